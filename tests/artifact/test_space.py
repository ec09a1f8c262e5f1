"""Room on the disk: refused before the model is read, and never where it would have been enough."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bessemer.artifact.space import check_space, least_weight_bytes
from bessemer.artifact.weight_file import data_end
from bessemer.cli import main
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model, generate_model
from bessemer.errors import ArtifactError
from bessemer.importer.weights import ModuleWeights
from tests.behaviours.models import save_folder, text_model
from tests.tiny_models import tiny

# Stacked experts, tied embeddings, tables, weights shared or merged, names of their own.
KINDS = ("llama", "gemma3_text", "mixtral", "gpt_neox", "deepseek_v3", "deepseek_v4")


@dataclass(frozen=True)
class Held:
    """A checkpoint of these shapes and dtypes."""

    tensors: dict[str, tuple[tuple[int, ...], str]]

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> Any:
        shape, dtype = self.tensors[name]
        return SimpleNamespace(shape=shape, dtype=dtype)


@pytest.mark.parametrize("weights", ["f16", "q8_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_is_below_the_file(kind: str, weights: str) -> None:
    """And not far: rows of tiny matrices are padded to 32."""
    _, model = tiny(kind)
    generated = generate_model(model, CompileOptions(weights=weights)).generated
    least = least_weight_bytes(ModuleWeights(model), model.config.to_dict(), weights)
    assert data_end(generated.weights) / 4 < least <= data_end(generated.weights)


def test_what_may_be_left_out_does_not_count() -> None:
    held = Held(
        {
            "model.embed_tokens.weight": ((100, 8), "bf16"),
            "lm_head.weight": ((100, 8), "bf16"),  # perhaps tied
            "model.layers.0.mlp.up_proj.weight": ((32, 32), "q4_k"),
            "layers.1.experts.w1": ((4, 32, 32), "bf16"),
            "model.layers.2.mlp.up_proj.weight": ((10**6, 64), "bf16"),  # beyond the last layer
            "mtp.layers.0.up_proj.weight": ((10**6, 64), "bf16"),
            "vision_tower.layers.0.weight": ((10**6, 64), "bf16"),
            "model.layers.0.attn.bias": ((1, 1, 10**6, 10**6), "f32"),
            "model.layers.0.table": ((10**6, 64), "i64"),
        }
    )
    config = {"num_hidden_layers": 2, "vocab_size": 100, "hidden_size": 8}
    numbers = 100 * 8 + 5 * 32 * 32
    for stated in (config, {"text_config": config}):
        assert least_weight_bytes(held, stated, "f16") == 2 * numbers
        assert least_weight_bytes(held, stated, "f32") == 4 * numbers
        assert least_weight_bytes(held, stated, "q8_0") == numbers * 34 / 32
    assert least_weight_bytes(held, {}, "f16") == 0


@pytest.mark.parametrize("layout", ["artifact", "buddy"])
def test_refused_before_the_model_is_read(
    layout: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = save_folder(tmp_path / "model", text_model(num_hidden_layers=1))

    def read(*given: object) -> None:
        raise AssertionError("the model was read")

    monkeypatch.setattr("bessemer.importer.api.import_model", read)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**4))
    out = tmp_path / "out"
    assert main(["compile", str(folder), "-o", str(out), "--layout", layout]) == 1
    (line,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("bessemer: "))
    assert line.startswith(f"bessemer: error: {out} needs 0.1 MB and {tmp_path} has 0.0 MB free: ")
    assert "choose another output folder (-o; for the cache set XDG_CACHE_HOME)" in line
    assert ("--weights q8_0" in line) == (layout == "artifact")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_large_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5 * 10**9))
    check_space(tmp_path, 5 * 10**9)
    with pytest.raises(ArtifactError, match=r"needs 7.25 GB and .* has 5.00 GB .* for 2.25 GB"):
        check_space(tmp_path / "not" / "there", 7_250_000_000)


@pytest.mark.parametrize("runner", [False, True])
def test_a_tiny_model_needs_little_and_what_is_asked_for_is_enough(
    runner: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is asked for once the tokenizer lies there: for all that comes after it."""
    folder = save_folder(tmp_path / "model", text_model(num_hidden_layers=1))
    asked: list[int] = []
    monkeypatch.setattr(
        "bessemer.artifact.writer.check_space", lambda where, needed: asked.append(needed)
    )
    out = compile_model(folder, CompileOptions(runner=runner), tmp_path / "out")
    before = ("tokenizer", "config.json", "special", "generation", "chat_template")
    files = [p for p in out.rglob("*") if p.is_file() and not p.name.startswith(before)]
    files += [out / "tokenizer.bin"] if runner else []
    assert sum(p.stat().st_size for p in files) <= asked[0]
    assert asked[0] < (6 if runner else 3) * 10**6
