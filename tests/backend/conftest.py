"""Saved IR of failed compilations goes to the test's own folder, whose name is an odd one. Nothing
is taken from other tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bessemer.backend import codegen, link


@pytest.fixture(autouse=True)
def odd_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a b' \" \\ é модель"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture(autouse=True)
def nothing_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's own functions, without `tests.sharing`."""
    for module, name in ((codegen, "compile_module"), (link, "_compile_all")):
        shared = getattr(module, name)
        monkeypatch.setattr(module, name, getattr(shared, "__wrapped__", shared))
