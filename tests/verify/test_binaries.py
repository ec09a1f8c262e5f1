"""Reading libraries and archives: those of a real artifact, and damaged ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from bessemer.backend.link import archive
from bessemer.errors import ArtifactError
from bessemer.verify.binaries import read_archive, read_library
from bessemer.verify.files import api_symbols


def test_api_symbols_are_those_of_the_public_headers() -> None:
    assert {"bsm_pool_create", "bsm_pool_destroy", "bsm_fork", "bsm_open"} <= api_symbols()
    assert "tiny_bsm_barrier" in api_symbols("tiny_")
    assert all(s.startswith("tiny_bsm_") for s in api_symbols("tiny_"))


def test_library_of_an_artifact(compiled: Path) -> None:
    info = read_library(compiled / "model.so")
    entries = {"_mlir_ciface_forward_prefill", "_mlir_ciface_forward_decode"}
    assert info.exports == entries | api_symbols()
    assert any("libc" in name or "libSystem" in name for name in info.needed)


def test_archive_of_an_artifact(compiled: Path) -> None:
    info = read_archive(compiled / "libmodel.a")
    assert "forward_prefill.o" in info.members
    assert "pool.o" in info.members
    assert "_mlir_ciface_forward_decode" in info.symbols
    assert api_symbols() <= info.symbols


def test_archive_with_long_names(tmp_path: Path, compiled: Path) -> None:
    names = ["a" * 40 + ".o", "b" * 90 + ".o", "c.o"]
    for name in names:
        (tmp_path / name).write_bytes((compiled / "model.so").read_bytes())
    archive([tmp_path / name for name in names], tmp_path / "x.a")
    assert list(read_archive(tmp_path / "x.a").members) == names


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.7, 0.95])
def test_cut_off_files_are_refused(compiled: Path, tmp_path: Path, share: float) -> None:
    for name, read in (("model.so", read_library), ("libmodel.a", read_archive)):
        data = (compiled / name).read_bytes()
        (tmp_path / name).write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ArtifactError, match=name):
            read(tmp_path / name)


@pytest.mark.parametrize("at", [0, 4, 16, 40, 58, 60])
def test_wrong_headers_never_crash(compiled: Path, tmp_path: Path, at: int) -> None:
    data = bytearray((compiled / "model.so").read_bytes())
    data[at : at + 2] = b"\xff\xff"
    (tmp_path / "model.so").write_bytes(data)
    try:
        info = read_library(tmp_path / "model.so")
    except ArtifactError:
        return
    assert "_mlir_ciface_forward_prefill" not in info.exports or at == 58
