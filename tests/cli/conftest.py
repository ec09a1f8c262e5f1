"""Fixtures: a cache of its own, the toy model, and a checkpoint that compiles to the toy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.cli import main
from tests.runtime.toy_text import favouring, write_model

Run = Callable[..., "Outcome"]


class Outcome:
    """What a command line gave. code: its exit code.  out, err: what it printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache" / "bessemer"


@pytest.fixture
def bessemer(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line in this process."""

    def run(*arguments: object) -> Outcome:
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """A compiled toy that always says `a`, and `b` when that is forbidden."""
    return write_model(tmp_path / "compiled", favouring(a=1000, b=900))


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose compilation is stood for by writing the toy; `compilations.txt` counts."""
    from safetensors.numpy import save_file

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300}))
    save_file({"w": np.ones((3, 3), np.float32)}, folder / "model.safetensors")

    def compile_model(
        source: Any, options: Any, output: Path, *, key: str = "", progress: Any = None
    ) -> Path:
        with (tmp_path / "compilations.txt").open("a") as log:
            log.write(f"{source} {options.weights}\n")
        for stage in ("import", "weights"):
            progress(stage, 0, 2)
            progress(stage, 2, 2)
        return write_model(
            output,
            favouring(a=1000),
            key=key,
            options=options.to_json(),
            compile_seconds=1.5,
            name="checkpoint",
        )

    monkeypatch.setattr("bessemer.api.compile_model", compile_model)
    return folder


@pytest.fixture
def compilations(tmp_path: Path) -> Callable[[], int]:
    """How many compilations there were."""

    def count() -> int:
        path = tmp_path / "compilations.txt"
        return len(path.read_text().splitlines()) if path.exists() else 0

    return count
