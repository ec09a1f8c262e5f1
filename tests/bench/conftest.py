"""One small model, compiled to measure itself, and the same without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from tests.tiny_models import WINDOW, tiny

CHUNK = 8
CONTEXT = 64


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixtral of three layers with a window, as transformers saves it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "mixtral"
    torch.set_num_threads(1)
    _, model = tiny("mixtral", sliding_window=WINDOW)
    model.save_pretrained(folder)
    return folder


def _options(profile: bool) -> CompileOptions:
    return CompileOptions(kv="f32", context=CONTEXT, chunk=CHUNK, profile=profile)


@pytest.fixture(scope="session")
def measured(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact that measures itself."""
    return compile_model(checkpoint, _options(True), tmp_path_factory.mktemp("p") / "model")


@pytest.fixture(scope="session")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact without a profile."""
    return compile_model(checkpoint, _options(False), tmp_path_factory.mktemp("n") / "model")
