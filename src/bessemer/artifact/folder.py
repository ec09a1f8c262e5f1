"""Folders that appear whole or not at all.

A folder is built beside its final name, flushed to the disk, and renamed. The folder under
construction holds a lock for as long as its process lives, so that what a killed process left is
told from what another one is writing.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from bessemer.artifact.manifest import MANIFEST_FILE, is_artifact
from bessemer.errors import ArtifactError

try:
    import fcntl
except ImportError:  # no flock on this system: stale folders go by age
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"
TEMPORARY = "tmp"
REPLACED = "old"
# A folder without a lock file is being made or was left half made; nobody needs longer than this
# to make one.
UNLOCKED_STALE_S = 60.0

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_destination(destination: Path) -> None:
    """Raise ArtifactError unless an artifact may be written at `destination`.

    It may where there is nothing, an empty folder, or another artifact alone. Whatever else is
    there is somebody's work and is not overwritten. That folders can be made there is tried.
    """
    try:
        if not destination.exists() and not destination.is_symlink():
            parent = _existing_parent(destination)
            if not parent.is_dir():
                raise ArtifactError(f"{destination}: {parent} is no folder; choose another output")
            _try_to_write(destination, parent)
            return
        if not destination.is_dir():
            raise ArtifactError(f"{destination} is a file; choose another output folder")
        if any(destination.iterdir()) and not is_artifact(destination):
            raise ArtifactError(
                f"{destination} is not empty and not a Bessemer artifact, so it is not "
                "overwritten; choose another output folder, or remove it first"
            )
        if others := _other_files(destination):
            raise ArtifactError(
                f"{destination} has files beside the compiled model's ({', '.join(others[:3])}), "
                "which would be lost with it; move them, or choose another output folder"
            )
        if destination.resolve() in (here := Path.cwd(), *here.parents):
            raise ArtifactError(
                f"{destination} is the folder you are in, which can't be replaced as a whole; name "
                "another one for the output"
            )
        _try_to_write(destination, destination.resolve().parent)
    except OSError as error:
        raise ArtifactError(f"{destination}: {error.strerror or error}") from None


def _other_files(artifact: Path) -> list[str]:
    """Files in an artifact's folder that it doesn't list; none where the list itself is damaged."""
    try:
        listed = {MANIFEST_FILE, *json.loads((artifact / MANIFEST_FILE).read_bytes())["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [name for name in tree(artifact) if name not in listed]


def tree(folder: Path) -> list[str]:
    """The files below `folder`, by relative path; locks are left out."""
    found = (p for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith(".lock"))
    return [p.relative_to(folder).as_posix() for p in found]


def _try_to_write(destination: Path, parent: Path) -> None:
    """Make a folder in `parent` and remove it: permissions alone don't tell what a file system,
    a quota or a container allows.
    """
    trial = parent / f".{destination.name[:100]}.{TEMPORARY}-{uuid.uuid4().hex[:12]}"
    try:
        trial.mkdir()
        trial.rmdir()
    except OSError as error:
        raise ArtifactError(
            f"{destination} can't be written: no folder can be made in {parent} "
            f"({error.strerror or error}); choose another output folder (-o), or for the cache set "
            "XDG_CACHE_HOME"
        ) from None


def _existing_parent(path: Path) -> Path:
    parent = path.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    return parent


@contextlib.contextmanager
def whole_folder(destination: Path, *, replace: bool = True) -> Iterator[Path]:
    """A new empty folder that becomes `destination` when the block ends without an error.

    replace: whether an artifact that is there by then is replaced; else it stays, and what was
    built is thrown away. Left-overs of killed processes beside it are removed. Raises ArtifactError
    where it can't be written or the disk is full; nothing is left behind then, and a `destination`
    that was there is as it was.
    """
    check_destination(destination)
    if destination.is_symlink():
        destination = destination.resolve()
    parent = destination.absolute().parent
    made: Path | None = None
    lock = -1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale(destination)
        made = _beside(destination, TEMPORARY)
        made.mkdir()
        lock = _take_lock(made)
        yield made
        _sync_tree(made)
        _publish(made, destination, replace)
        made = None
    except OSError as error:
        what = error.strerror or str(error)
        raise ArtifactError(
            f"{destination} could not be written ({what}); nothing was changed there"
        ) from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _beside(destination: Path, kind: str) -> Path:
    """A new name in the same folder, which can be renamed without crossing file systems."""
    name = destination.name[:100]
    return destination.absolute().parent / f".{name}.{kind}-{uuid.uuid4().hex[:12]}"


def _take_lock(folder: Path) -> int:
    """Lock a new folder for this process; the descriptor to close, or -1 without flock.

    The lock file gets its name when it is locked, so nobody finds it unlocked before.
    """
    if fcntl is None:
        return -1
    path = folder / f"{LOCK_FILE}-{os.getpid()}"
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system without locks: stale folders go by age there
        os.close(lock)
        path.unlink()
        return -1
    path.rename(folder / LOCK_FILE)
    return lock


def _is_stale(folder: Path) -> bool:
    """Whether the process that was building `folder` is gone."""
    try:
        if fcntl is None or not (folder / LOCK_FILE).exists():
            return time.time() - folder.stat().st_mtime > UNLOCKED_STALE_S
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def remove_stale(destination: Path) -> None:
    """Remove what killed processes left beside `destination`, and put back an artifact that one
    of them had moved aside and not yet replaced.
    """
    parent, name = destination.absolute().parent, destination.name[:100]
    try:
        siblings = list(parent.iterdir())
    except OSError:
        return
    for path in siblings:
        if path.name.startswith(f".{name}.{REPLACED}-") and not destination.exists():
            with contextlib.suppress(OSError):
                path.rename(destination)
        elif path.name.startswith((f".{name}.{TEMPORARY}-", f".{name}.{REPLACED}-")) and _is_stale(
            path
        ):
            shutil.rmtree(path, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    """Flush every file and folder to the disk; a rename before that could outlive its content."""
    for root, _, files in os.walk(folder):
        for name in files:
            if name != LOCK_FILE:
                _sync(Path(root, name))
        _sync(Path(root))


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _publish(made: Path, destination: Path, replace: bool) -> None:
    """Give the finished folder its name."""
    (made / LOCK_FILE).unlink(missing_ok=True)
    if not destination.exists():
        try:
            made.rename(destination)
            _sync(destination.absolute().parent)
            return
        except OSError:  # another process was faster
            if not destination.is_dir():
                raise
    if is_artifact(destination) and not replace:
        shutil.rmtree(made, ignore_errors=True)
        return
    check_destination(destination)
    if not _exchange(made, destination):
        aside = _beside(destination, REPLACED)
        destination.rename(aside)
        try:
            made.rename(destination)
        except OSError:
            aside.rename(destination)
            raise
        made = aside
    _sync(destination.absolute().parent)
    shutil.rmtree(made, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one step, so that there is always one of the name. False where the
    system can't do that.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    names = os.fsencode(first), os.fsencode(second)
    return renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0
