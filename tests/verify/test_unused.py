"""`verify` names what the model leaves out of its checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bessemer.compiler import compile_model
from bessemer.verify import verify
from tests.verify.support import OPTIONS


def test_tensors_that_are_left_out_have_a_line(
    checkpoint: Path, compiled: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "llama"))
    weights = folder / "model.safetensors"
    more = {"model.layers.2.mlp.up_proj.weight": torch.ones(3)}
    save_file({**load_file(weights), **more}, weights, {"format": "pt"})
    out = compile_model(folder, OPTIONS, tmp_path / "out")
    report = verify(out, lengths=(3,), decode_steps=1)
    assert report.ok, report.failed
    (line,) = (c for c in report.checks if c.name == "unused tensors")
    assert "1 tensor(s) of the checkpoint: model.layers.2.mlp.up_proj.weight" in line.detail
    plain = verify(compiled, lengths=(1,), decode_steps=0)
    assert not [c for c in plain.checks if c.name == "unused tensors"]
