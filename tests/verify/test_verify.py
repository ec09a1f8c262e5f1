"""`verify` on a whole artifact, and on the ways in which one can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bessemer.artifact.manifest import MANIFEST_FILE
from bessemer.artifact.reader import read_manifest
from bessemer.cli import main
from bessemer.compiler import compile_model
from bessemer.errors import CheckpointError, UsageError
from bessemer.verify import Report, verify
from tests.tiny_models import tiny
from tests.verify.support import OPTIONS, rewrite_manifest, rewrite_weight

LAYERS = ("files", "memory", "numbers")


def quick(model: object, **options: object) -> Report:
    return verify(model, **{"lengths": (1, 5), "decode_steps": 2, **options})  # type: ignore[arg-type]


def outcome(report: Report, name: str) -> tuple[bool, str]:
    found = [c for c in report.checks if c.name == name]
    assert len(found) == 1, [c.name for c in report.checks]
    return found[0].ok, found[0].detail


# --- a whole artifact -----------------------------------------------------------------------------


def test_a_whole_artifact_is_verified(compiled: Path) -> None:
    report = verify(compiled)
    assert report.ok, report.failed
    assert {c.layer for c in report.checks} == set(LAYERS)
    names = {c.name for c in report.checks}
    assert {"prefill 1", "prefill 7", "prefill 33", "prefill 1+7+25"} <= names
    assert {"prefill 21 in chunks of 16", "decode 8 steps after 33"} <= names
    assert "PyTorch" in outcome(report, "reference")[1]
    assert "bit for bit" in outcome(report, "weight bits")[1]


def test_command_line_prints_json_and_exits_with_0(
    compiled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(compiled), "--json", "--lengths", "3", "--decode-steps", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert all(set(c) == {"name", "ok", "detail"} for c in report["checks"])


def test_without_its_checkpoint_the_kept_graph_is_the_reference(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    rewrite_manifest(artifact, source={**manifest.source, "path": "/nowhere/llama"})
    report = quick(artifact)
    assert report.ok, report.failed
    detail = outcome(report, "reference")[1]
    assert "NumPy reference" in detail
    assert "/nowhere/llama" in detail


def test_without_torch_the_row_says_what_to_install(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_again(*arguments: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr("bessemer.verify.api.compile_again", compile_again)
    report = quick(artifact)
    ok, detail = outcome(report, "source")
    assert not ok
    assert detail.startswith("not compared: torch is not installed; ")
    assert "pip install 'bessemer[compile]'" in detail
    assert "NumPy reference" in outcome(report, "reference")[1]


def test_without_checkpoint_and_graph_nothing_is_proved(artifact: Path) -> None:
    shutil.rmtree(artifact / "graph")
    manifest = read_manifest(artifact)
    files = {k: v for k, v in manifest.files.items() if not k.startswith("graph/")}
    rewrite_manifest(artifact, source={}, files=files)
    report = quick(artifact)
    assert not report.ok
    assert not outcome(report, "reference")[0]


class Bigram(torch.nn.Module):
    """A plain module, without attention and without a config."""

    max_position_embeddings = 32

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(23, 16)
        self.place = torch.nn.Embedding(32, 16)
        self.head = torch.nn.Linear(16, 23)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids) + self.place(positions)
        return self.head(torch.nn.functional.silu(hidden))


def test_a_module_is_verified_in_this_process() -> None:
    report = quick(Bigram(), options=replace(OPTIONS, weights="bf16", context=32))
    assert report.ok, report.failed


def test_the_title_is_the_model_not_its_place_in_the_cache(
    compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = SimpleNamespace(artifact=SimpleNamespace(folder=compiled))
    monkeypatch.setattr("bessemer.api.prepare", lambda *model, **how: cached)
    monkeypatch.setattr("bessemer.verify.api.Verification.check", lambda *run: None)
    assert verify("owner/name").subject == "verification of owner/name"
    assert verify(compiled).subject == f"verification of {compiled}"


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"lengths": ()}, {"lengths": (0,)}, {"lengths": (10**6,)}, {"decode_steps": -1}]
)
def test_senseless_arguments_are_refused(compiled: Path, options: dict) -> None:
    with pytest.raises(UsageError):
        quick(compiled, **options)


def test_the_command_line_refuses_what_is_no_number(compiled: Path) -> None:
    assert main(["verify", str(compiled), "--lengths", "1,x"]) == 2
    assert main(["verify", str(compiled), "--kv", "f32"]) == 2


def test_options_of_a_compiled_model_are_refused(compiled: Path) -> None:
    with pytest.raises(UsageError, match="compiled already"):
        quick(compiled, options=OPTIONS)


def test_what_does_not_exist_is_an_error_not_a_report(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        quick(tmp_path / "nothing here")


# --- damage ---------------------------------------------------------------------------------------


def flip(name: str, at: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(at * len(data))] ^= 1
        (folder / name).write_bytes(data)

    return damage


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-64])


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def fill(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content)


DAMAGE = {
    "no manifest": (remove(MANIFEST_FILE), "files: manifest.json"),
    "manifest cut": (cut(MANIFEST_FILE), "files: manifest.json"),
    "manifest not JSON": (fill(MANIFEST_FILE, b"\xff\x00{"), "files: manifest.json"),
    "manifest of others": (fill(MANIFEST_FILE, b'{"format": 3}'), "files: manifest.json"),
    "no library": (remove("model.so"), "files: file model.so"),
    "library cut": (cut("model.so"), "files: file model.so"),
    "library byte": (flip("model.so", 0.5), "files: hash model.so"),
    "library empty": (fill("model.so", b""), "files: file model.so"),
    "archive byte": (flip("libmodel.a", 0.5), "files: hash libmodel.a"),
    "no archive": (remove("libmodel.a"), "files: file libmodel.a"),
    "header byte": (flip("model.h", 0.2), "files: hash model.h"),
    "no header": (remove("model.h"), "files: file model.h"),
    "no weights": (remove("weights.bin"), "files: file weights.bin"),
    "weights cut": (cut("weights.bin"), "files: file weights.bin"),
    "weight byte": (flip("weights.bin", 0.3), "memory: weight "),
    "weight table": (flip("weights.bin", 0.999), "memory: weight table"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_a_failed_check(kind: str, artifact: Path) -> None:
    damage, expected = DAMAGE[kind]
    damage(artifact)
    report = quick(artifact)
    assert not report.ok
    failed = [c.to_json()["name"] for c in report.failed]
    assert any(name.startswith(expected) for name in failed), failed


def test_a_damaged_table_hides_no_other_check(artifact: Path) -> None:
    flip("weights.bin", 0.999)(artifact)
    report = quick(artifact)
    count = len(read_manifest(artifact).files)
    assert outcome(report, "presence and sizes") == (True, f"{count} files")
    assert outcome(report, "checksums")[0]


def test_threads_of_pytorch_are_as_before(compiled: Path) -> None:
    before = torch.get_num_threads()
    assert quick(compiled, threads=before + 1).ok
    assert torch.get_num_threads() == before


class Counter(torch.nn.Module):
    """A plain module with a cache of its own: a buffer that it changes is state."""

    max_position_embeddings = 32

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(23, 16)
        self.head = torch.nn.Linear(16, 23)
        self.register_buffer("cache", torch.zeros(32, 16))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.cache[positions[0]] = self.embed(ids)[0]
        seen = torch.arange(32)[None] <= positions[0][:, None]
        return self.head(torch.tanh(seen.to(torch.float32) @ self.cache))[None]


def test_a_module_with_a_cache_of_its_own_is_verified() -> None:
    report = quick(Counter(), options=replace(OPTIONS, weights="f32", context=32))
    assert report.ok, report.failed


def test_a_damaged_artifact_exits_with_1(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remove("model.so")(artifact)
    assert main(["verify", str(artifact), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_a_header_of_another_model_is_told_by_its_sizes(artifact: Path) -> None:
    header = artifact / "model.h"
    header.write_text(header.read_text().replace("BSM_STATE_BYTES ", "BSM_STATE_BYTES 1"))
    rewrite_manifest(artifact)
    ok, detail = outcome(quick(artifact), "model.h")
    assert not ok
    assert "BSM_STATE_BYTES" in detail


def test_a_foreign_target_is_named_and_not_run(artifact: Path) -> None:
    manifest = read_manifest(artifact)
    rewrite_manifest(artifact, target={**manifest.target, "triple": "riscv64-unknown-linux-gnu"})
    report = quick(artifact)
    assert "riscv64" in outcome(report, "target")[1]
    assert not outcome(report, "logits")[0]
    assert not any(c.name.startswith("prefill") for c in report.checks)


def test_another_checkpoint_differs_in_its_bits(artifact: Path, tmp_path: Path) -> None:
    _, model = tiny("llama", num_hidden_layers=2, seed=1)
    model.save_pretrained(tmp_path / "other")
    report = quick(artifact, checkpoint=tmp_path / "other")
    assert not outcome(report, "weight bits")[0]
    # The numbers are compared on what is stored, and that is right.
    assert [c.name for c in report.failed] == ["weight bits"]


def test_a_smaller_checkpoint_has_other_tables(artifact: Path, tmp_path: Path) -> None:
    _, model = tiny("llama", num_hidden_layers=3)
    model.save_pretrained(tmp_path / "other")
    report = quick(artifact, checkpoint=tmp_path / "other")
    ok, detail = outcome(report, "tables")
    assert not ok
    assert "layers.2" in detail


def test_a_changed_weight_is_seen_in_its_bits_and_used_by_the_reference(artifact: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def negate(data: np.ndarray) -> None:
        data[1::2] ^= 0x80  # the signs of f16 numbers

    rewrite_weight(artifact, name, negate)
    report = quick(artifact)
    ok, detail = outcome(report, "weight bits")
    assert not ok
    assert name in detail
    assert [c.name for c in report.failed] == ["weight bits"]


def test_code_of_another_model_gives_other_numbers(artifact: Path, tmp_path: Path) -> None:
    """The same shapes and the same layouts, with another rotary base in the code."""
    rope = {"rope_type": "default", "rope_theta": 77.0}
    _, model = tiny("llama", num_hidden_layers=2, rope_parameters=rope)
    other = compile_model(model, OPTIONS, tmp_path / "other")
    shutil.copy(other / "model.so", artifact / "model.so")
    rewrite_manifest(artifact)
    report = quick(artifact, lengths=(5,), decode_steps=0)
    assert not outcome(report, "prefill 5")[0]
    stages = {c.name: c for c in report.checks if c.layer == "stages"}
    assert [stages[n].ok for n in ("imported graph", "lowered prefill", "compiled again")] == [
        True
    ] * 3
    assert stages["first difference"].detail.startswith("the artifact")
