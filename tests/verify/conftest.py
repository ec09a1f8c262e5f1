"""One small compiled model for all tests of a process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bessemer.compiler import compile_model
from tests.tiny_models import tiny
from tests.verify.support import OPTIONS


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Test processes share the machine's cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer llama, as transformers saves it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "llama"
    _, model = tiny("llama", num_hidden_layers=2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def compiled(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of `checkpoint`. Not to be changed: copy it."""
    return compile_model(checkpoint, OPTIONS, tmp_path_factory.mktemp("compiled") / "llama")


@pytest.fixture
def artifact(compiled: Path, tmp_path: Path) -> Path:
    """A copy of the artifact that a test may damage."""
    return Path(shutil.copytree(compiled, tmp_path / "artifact"))
