"""Compiled models that the user did not place: found again by what they were made of.

    $XDG_CACHE_HOME/bessemer/models/KEY/        an artifact
                             locks/KEY          held by the process that compiles it
                             fingerprints/HASH  the content key of a checkpoint that was seen

A key covers the checkpoint's content, the options, the machine that the code is for, and the
compiler itself (its sources and the versions of what it stands on).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bessemer.artifact.manifest import canonical, is_artifact
from bessemer.artifact.reader import Artifact, open_artifact, read_manifest
from bessemer.errors import ArtifactError

try:
    import fcntl
except ImportError:  # without flock two processes may compile the same model; the result is whole
    fcntl = None  # type: ignore[assignment]

# What an artifact's content depends on: these rooms, and these distributions.
COMPILER_ROOMS = (
    "importer", "graph", "passes", "codegen", "backend", "native", "artifact", "quantize", "models",
)  # fmt: skip
COMPILER_FILES = (
    "compiler.py", "compile_options.py", "weight_formats.py", "artifact_parts.py", "libraries.py",
)  # fmt: skip
COMPILER_DISTRIBUTIONS = (
    "torch",
    "transformers",
    "llvmlite",
    "xtc-mlir-python-bindings",
    "tokenizers",
)
# A file that changed this shortly before it was looked at may change again within the same tick of
# the file system's clock; its content key is not remembered.
SETTLED_NS = 2_000_000_000


def cache_root() -> Path:
    """The cache folder; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore a relative one.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "bessemer"


# -- keys -----------------------------------------------------------------------------------------


@cache
def compiler_version() -> str:
    """SHA-256 over the compiler's sources and the versions of what it compiles with."""
    from importlib.metadata import PackageNotFoundError, version

    digest = hashlib.sha256(sources_digest(Path(__file__).resolve().parents[1]).encode())
    for name in COMPILER_DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            digest.update(f"{name}={version(name)}\0".encode())
    return digest.hexdigest()


def sources_digest(package: Path) -> str:
    """SHA-256 over the sources in the package's folder that decide what an artifact holds."""
    sources = [package / name for name in COMPILER_FILES]
    for room in COMPILER_ROOMS:
        sources += sorted((package / room).rglob("*.[pch]*"))
    digest = hashlib.sha256()
    for path in sources:
        if path.suffix in (".py", ".c", ".h") and path.is_file():
            digest.update(f"{path.relative_to(package).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_key(fingerprint: str, options: Mapping[str, Any]) -> str:
    """The key of a checkpoint compiled with `options` (JSON) for this machine, or for the target
    that they name.
    """
    from bessemer.runtime.cpu import host_arch, host_features

    parts: dict[str, Any] = {
        "checkpoint": fingerprint,
        "options": dict(options),
        "compiler": compiler_version(),
    }
    if options.get("target", "native") == "native":
        parts["host"] = [host_arch(), sorted(host_features())]
    return hashlib.sha256(canonical(parts)).hexdigest()[:40]


def checkpoint_fingerprint(
    path: Path, compute: Callable[[Path], tuple[str, Sequence[Path]]]
) -> str:
    """The content key of the checkpoint at `path`, without reading its gigabytes again.

    compute: gives the key and the files it stands for. It is called unless all these files have the
    size, times and inode that they had when their content was last read, and a folder the same
    entries. (A change that keeps even the time of the last status change would need the clock set.)
    """
    memory = cache_root() / "fingerprints" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(memory.read_bytes())
        if _describe(path, [Path(f[0]) for f in record["files"]]) == record["files"]:
            return str(record["fingerprint"])
    looked = time.time_ns()
    fingerprint, files = compute(path)
    described = _describe(path, files)
    settled = all(max(f[2], f[3]) < looked - SETTLED_NS for f in described)
    if settled:
        with contextlib.suppress(OSError):  # a cache that can't be written only costs time
            memory.parent.mkdir(parents=True, exist_ok=True)
            _write_whole(memory, canonical({"fingerprint": fingerprint, "files": described}))
    return fingerprint


def _describe(path: Path, files: Sequence[Path]) -> list[list[Any]]:
    """What tells that files have not changed: path, size, times and inode; for a checkpoint in a
    folder also the folder itself, whose time changes with its entries.
    """
    described = []
    for file in sorted({*files, *([path] if path.is_dir() else [])}):
        status = file.stat()
        times = [status.st_mtime_ns, status.st_ctime_ns]
        described.append([str(file), status.st_size, *times, status.st_ino])
    return described


def _write_whole(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name[:60]}.{uuid.uuid4().hex[:12]}")
    temporary.write_bytes(data)
    temporary.replace(path)


# -- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachedModel:
    """One compiled model of the cache. used: seconds since the epoch of its last use."""

    key: str
    folder: Path
    name: str
    nbytes: int
    used: float


def model_folder(key: str) -> Path:
    """Where the model of `key` is, or would be."""
    return cache_root() / "models" / key


def find(key: str) -> Artifact | None:
    """The compiled model of `key`, or None when there is none that is whole and runs here."""
    folder = model_folder(key)
    if not is_artifact(folder):
        return None
    try:
        artifact = open_artifact(folder)
    except ArtifactError:
        return None
    if artifact.manifest.key != key:
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)
    return artifact


def find_or_make(
    key: str,
    make: Callable[[Path], object],
    waiting: Callable[[], None] = lambda: None,
) -> tuple[Artifact, bool]:
    """The compiled model of `key`; makes it when there is none. The flag says whether it was made.

    make: writes the artifact, with that key, to the folder it is given. Of several processes that
    want the same model one makes it and the others wait; `waiting` is called before that.
    Raises ArtifactError when the cache can't be written.
    """
    found = find(key)
    if found is not None:
        return found, False
    with _lock(key, waiting):
        found = find(key)
        if found is not None:
            return found, False
        folder = model_folder(key)
        make(folder)
        return open_artifact(folder), True


@contextlib.contextmanager
def _lock(key: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the key's lock. It is released with the process, however that ends."""
    path = cache_root() / "locks" / key
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        model_folder(key).parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ArtifactError(
            f"the cache folder {cache_root()} can't be written ({error.strerror or error}): set "
            "XDG_CACHE_HOME to a folder that can, or compile with `bessemer compile MODEL -o DIR`"
        ) from None
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                pass
        yield
    finally:
        os.close(handle)


def cached_models() -> list[CachedModel]:
    """All compiled models of the cache, the last used one first. Damaged ones are left out."""
    found = []
    for folder in _entries(cache_root() / "models"):
        with contextlib.suppress(ArtifactError, OSError):
            manifest = read_manifest(folder)
            nbytes = sum(record.nbytes for record in manifest.files.values())
            used = folder.stat().st_mtime
            found.append(CachedModel(folder.name, folder, manifest.name, nbytes, used))
    return sorted(found, key=lambda model: -model.used)


def _entries(folder: Path) -> list[Path]:
    try:
        return [p for p in folder.iterdir() if not p.name.startswith(".") and p.is_dir()]
    except OSError:
        return []


def remove(key: str) -> None:
    """Remove a compiled model from the cache. A process that runs it goes on with its files."""
    folder = model_folder(key)
    if is_artifact(folder):
        shutil.rmtree(folder, ignore_errors=True)
