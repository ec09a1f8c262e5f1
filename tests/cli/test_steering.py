"""`--steering` on the command line, with models that can't be steered."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bessemer.errors import UsageError
from bessemer.runtime.model import Model

from .conftest import Run


def test_a_model_that_was_compiled_without(bessemer: Run, compiled: Path, tmp_path: Path) -> None:
    file = tmp_path / "directions.f32"
    file.write_bytes(bytes(64))
    for verb in (("run", compiled, "-p", "hello"), ("chat", compiled)):
        done = bessemer(*verb, "--steering", file, "--steering-attn", 1)
        assert done.code == 2
        assert "compiled without steering" in done.err
    model = Model.load(compiled)
    for steer in (model.steer, model.session().steer):
        with pytest.raises(UsageError, match="compiled without steering"):
            steer(np.zeros((1, 4), np.float32))
    model.steer(None)  # nothing to end is fine


def test_scales_need_a_file(bessemer: Run, compiled: Path) -> None:
    for option in ("--steering-attn", "--steering-ffn"):
        done = bessemer("run", compiled, "-p", "hello", option, 0.5)
        assert done.code == 2
        assert "--steering FILE" in done.err


def test_options_that_a_model_does_not_have(bessemer: Run, compiled: Path) -> None:
    done = bessemer("run", compiled, "-p", "hello", "--low-precision")
    assert done.code == 2
    assert "compiled already" in done.err
