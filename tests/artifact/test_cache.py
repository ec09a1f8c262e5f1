"""The cache: keys, remembered fingerprints, parallel processes, folders that can't be written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bessemer.artifact import cache
from bessemer.errors import ArtifactError

from .fakes import write_fake


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bessemer"


def test_where_it_is(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.cache_root() == root
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache.cache_root() == Path("/home/someone/.cache/bessemer")


def test_keys_depend_on_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"weights": "f16", "target": "native"}
    keys = {
        cache.cache_key("a", options),
        cache.cache_key("b", options),
        cache.cache_key("a", {**options, "weights": "f32"}),
        cache.cache_key("a", {**options, "target": "aarch64"}),
    }
    monkeypatch.setattr("bessemer.runtime.cpu.host_features", lambda: frozenset({"other"}))
    keys.add(cache.cache_key("a", options))
    aarch64 = cache.cache_key("a", {**options, "target": "aarch64"})
    assert aarch64 in keys
    monkeypatch.setattr(cache, "compiler_version", lambda: "newer")
    keys.add(cache.cache_key("a", options))
    assert len(keys) == 6


def test_the_compilers_sources_are_part_of_its_version(tmp_path: Path) -> None:
    def write(name: str, text: str = "x") -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    versions = []
    for name in ("compiler.py", "codegen/kernels/matvec.py", "native/pool.c", "native/bessemer.h"):
        write(name)
        versions.append(cache.sources_digest(tmp_path))
    write("codegen/kernels/matvec.py", "y")
    versions.append(cache.sources_digest(tmp_path))
    assert len(set(versions)) == 5
    write("runtime/session.py")
    write("codegen/__pycache__/matvec.pyc")
    assert cache.sources_digest(tmp_path) == versions[-1]
    assert cache.sources_digest(Path(cache.__file__).parents[1]) != cache.sources_digest(tmp_path)
    assert cache.compiler_version()


def make(key: str, code: bytes = b"code") -> object:
    return lambda folder: write_fake(folder, key=key, code=code)


def test_made_once(root: Path) -> None:
    assert cache.find("k1") is None
    artifact, made = cache.find_or_make("k1", make("k1"))
    assert made
    assert artifact.folder == root / "models" / "k1"
    again, made = cache.find_or_make("k1", lambda folder: pytest.fail("made twice"))
    assert not made
    assert again.manifest == artifact.manifest


def test_a_damaged_one_is_made_again() -> None:
    artifact, _ = cache.find_or_make("k1", make("k1"))
    artifact.library.write_bytes(b"edoc")
    assert cache.find("k1") is None
    artifact, made = cache.find_or_make("k1", make("k1", b"better"))
    assert made
    assert artifact.library.read_bytes() == b"better"


def test_one_of_another_key_is_not_taken() -> None:
    write_fake(cache.model_folder("k1"), key="k2")
    assert cache.find("k1") is None


def test_models_are_listed_by_last_use() -> None:
    for key in ("k1", "k2", "k3"):
        cache.find_or_make(key, make(key))
        os.utime(cache.model_folder(key), (1, 1))
    (cache.cache_root() / "models" / "k3" / "manifest.json").write_text("damaged")
    cache.find("k1")
    listed = cache.cached_models()
    assert [m.key for m in listed] == ["k1", "k2"]
    assert listed[0].name == "fake"
    assert listed[0].nbytes > 4096
    cache.remove("k1")
    assert [m.key for m in cache.cached_models()] == ["k2"]


def test_a_failure_leaves_nothing() -> None:
    def fails(folder: Path) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.find_or_make("k1", fails)
    assert cache.find_or_make("k1", make("k1"))[1]


PROCESS = """
import sys, time
sys.path.append(sys.argv[1])
from tests.artifact.fakes import write_fake
from bessemer.artifact import cache
def make(folder):
    print("made", flush=True)
    time.sleep(0.2)
    write_fake(folder, key="k")
cache.find_or_make("k", make)
"""


def test_c11_eight_processes_at_once() -> None:
    command = [sys.executable, "-c", PROCESS, str(Path(__file__).parents[1])]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    outputs = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0] * 8
    assert "".join(outputs) == "made\n"
    assert cache.find("k") is not None


def test_a_killed_process_does_not_keep_the_lock() -> None:
    script = PROCESS.replace("time.sleep(0.2)", "time.sleep(60)")
    command = [sys.executable, "-c", script, str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "made\n"
        process.kill()
    assert cache.find_or_make("k", make("k"))[1]


def test_l10_a_cache_that_cannot_be_written(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests may run as root, whom no permission stops: a file is in the way instead.
    root.parent.mkdir(parents=True)
    root.write_text("in the way")
    with pytest.raises(ArtifactError, match=r"cache folder .* can't be written .*XDG_CACHE_HOME"):
        cache.find_or_make("k", make("k"))


# -- fingerprints ---------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    settle(folder)
    return folder


def settle(folder: Path) -> None:
    """Wait until the change times are old enough: they can't be set."""
    time.sleep(0.02)


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, path: Path) -> tuple[str, list[Path]]:
        self.calls += 1
        files = sorted(p for p in path.iterdir())
        return "".join(p.read_text() for p in files), files


def test_a_fingerprint_is_remembered(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SETTLED_NS", 10_000_000)
    compute = Counting()
    assert cache.checkpoint_fingerprint(checkpoint, compute) == "{}weights"
    assert cache.checkpoint_fingerprint(checkpoint, compute) == "{}weights"
    assert compute.calls == 1


def test_c15_a_changed_byte(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "SETTLED_NS", 10_000_000)
    compute = Counting()
    cache.checkpoint_fingerprint(checkpoint, compute)
    file = checkpoint / "model.safetensors"
    before = file.stat()
    with file.open("r+b") as stream:
        stream.write(b"W")
    # Even with its size and its time of modification put back.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cache.checkpoint_fingerprint(checkpoint, compute) == "{}Weights"
    settle(checkpoint)
    (checkpoint / "extra.json").write_text("!")
    assert cache.checkpoint_fingerprint(checkpoint, compute) == "{}!Weights"
    assert compute.calls == 3


def test_a_file_that_just_changed_is_not_trusted(checkpoint: Path) -> None:
    compute = Counting()
    cache.checkpoint_fingerprint(checkpoint, compute)
    cache.checkpoint_fingerprint(checkpoint, compute)
    assert compute.calls == 2


def test_a_damaged_memory_is_ignored(
    checkpoint: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SETTLED_NS", 10_000_000)
    compute = Counting()
    cache.checkpoint_fingerprint(checkpoint, compute)
    for text in ("", "[]", "{}", '{"files": 3}'):
        for file in (root / "fingerprints").iterdir():
            file.write_text(text)
        assert cache.checkpoint_fingerprint(checkpoint, compute) == "{}weights"
    assert compute.calls == 5


def test_fingerprints_without_a_writable_cache(checkpoint: Path, root: Path) -> None:
    root.parent.mkdir(parents=True)
    root.write_text("in the way")
    assert cache.checkpoint_fingerprint(checkpoint, Counting()) == "{}weights"
