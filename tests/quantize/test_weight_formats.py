"""Names of weight formats, and the one that a checkpoint gets unasked."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bessemer.compile_options import CompileOptions, with_weights
from bessemer.errors import UsageError
from bessemer.importer.checkpoint import open_checkpoint
from bessemer.weight_formats import ALIASES, WEIGHT_FORMATS, DefaultFormat
from tests.importer.checkpoint.builders import LLAMA_METADATA, llama_tensors, tiny_gguf


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Held:
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def info(self, name: str) -> Tensor:
        return self.tensors[name]


def default(*tensors: Tensor) -> DefaultFormat:
    return DefaultFormat.of(Held({str(i): t for i, t in enumerate(tensors)}))


@pytest.mark.parametrize("alias", ["w8a32", "w8a16", "w8a8"])
def test_aliases_are_recorded_as_what_they_are(alias: str) -> None:
    options = CompileOptions(weights=alias)
    assert options == CompileOptions(weights="q8_0")  # one entry of the cache
    assert options.to_json()["weights"] == "q8_0"
    assert set(ALIASES.values()) <= set(WEIGHT_FORMATS)


@pytest.mark.parametrize("wrong", ["w8", "int8", "Q8_0", "", ["q8_0"], 8])
def test_other_names_are_refused_with_all_that_there_are(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"choose one of f32, f16, bf16, q8_0, w8a32, w8a16, w8a8"):
        CompileOptions(weights=wrong)  # type: ignore[arg-type]


def test_most_numbers_of_the_matrices_decide() -> None:
    vectors = Tensor((10_000,), "f32")
    assert default(vectors, Tensor((8, 64), "q4_k"), Tensor((7, 64), "f16")).name == "q8_0"
    assert default(vectors, Tensor((8, 64), "q4_k"), Tensor((8, 64), "f16")).name == "f16"
    assert default(Tensor((8, 64), "f32"), Tensor((8, 64), "i64")).name == "f16"
    assert default().name == "f16"


def test_the_formats_that_decided_are_named_the_commonest_first() -> None:
    mixed = default(Tensor((8, 64), "q8_0"), Tensor((9, 64), "q4_1"), Tensor((2, 64), "bf16"))
    assert mixed.quantised == ("q4_1", "q8_0")
    assert default(Tensor((9, 64), "q4_1"), Tensor((90, 64), "bf16")).quantised == ()


@pytest.mark.parametrize(("form", "expected"), [("q5_1", "q8_0"), ("f16", "f16"), ("f32", "f16")])
def test_of_a_file(form: str, expected: str, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors(form), LLAMA_METADATA)
    with open_checkpoint(path) as checkpoint:
        chosen = with_weights(CompileOptions(context=64), checkpoint)
        assert chosen == CompileOptions(weights=expected, context=64)
        # Asked for, or lowered without kernels, it is another matter.
        assert with_weights(CompileOptions("bf16"), checkpoint).weights == "bf16"
        assert with_weights(CompileOptions(schedule="generic"), checkpoint).weights == "f16"


def test_what_is_chosen_for_a_quantised_checkpoint_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = logging.getLogger("bessemer.compile_options")
    monkeypatch.setattr(log, "handlers", [caplog.handler])  # the command line stops propagation
    caplog.set_level(logging.INFO, log.name)
    for dtype, options in (
        ("q4_k", CompileOptions()),
        ("f16", CompileOptions()),
        ("q4_k", CompileOptions("f16")),
    ):
        with_weights(options, Held({"w": Tensor((8, 64), dtype)}))  # type: ignore[arg-type]
    (message,) = {record.getMessage() for record in caplog.records}
    assert "(q4_k)" in message
    assert "stored as q8_0" in message
    assert "--weights" in message
