"""The weights in memory: mapped from the file, or read once into huge pages.

Mapped, they are shared between processes, start at once, and can be dropped by the system. In huge
pages they take memory of their own and some time to read, and the processor walks through them
faster, since it needs fewer translations.
"""

from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bessemer.artifact.reader import Artifact
from bessemer.errors import ArtifactError, UsageError
from bessemer.runtime.cpu import default_threads
from bessemer.runtime.memory import allocate

MODES = ("auto", "map", "huge")
MODE_VARIABLE = "BESSEMER_WEIGHTS"
# A piece for one thread: many huge pages, and small enough to spread over the threads.
READ_BYTES = 16 << 20
# More readers than this don't read faster from the page cache.
MOST_READERS = 4


def load_weights(artifact: Artifact, mode: str | None = None) -> npt.NDArray[np.uint8]:
    """The tensors of weights.bin, uint8, read-only, page-aligned.

    mode: "map", "huge" or "auto"; the environment variable BESSEMER_WEIGHTS, then "auto", when
    None. "auto" takes huge pages where the system offers them and half of the free memory holds
    the weights.
    """
    mode = mode or os.environ.get(MODE_VARIABLE, "").strip() or "auto"
    if mode not in MODES:
        raise UsageError(f"{MODE_VARIABLE} or weights mode {mode!r}: it must be one of {MODES}")
    nbytes = artifact.manifest.weights_nbytes
    if mode == "auto":
        mode = "huge" if huge_pages_offered() and nbytes < available_memory() // 2 else "map"
    try:
        with artifact.weights_file.open("rb", buffering=0) as stream:
            if os.fstat(stream.fileno()).st_size < nbytes:
                raise ArtifactError(f"{artifact.weights_file} was cut off: compile the model again")
            if nbytes == 0:
                return allocate(0)
            if mode == "map":
                return _map(stream.fileno(), nbytes)
            return _read(stream.fileno(), nbytes, artifact.weights_file)
    except OSError as error:
        where = artifact.weights_file
        if error.errno == errno.ENOMEM and mode == "huge":
            raise ArtifactError(
                f"no memory for {nbytes} bytes of weights ({where}){_advice()}"
            ) from None
        raise ArtifactError(f"{where} can't be read: {error.strerror or error}") from None


def _advice() -> str:
    """What helps where huge pages take too much. A limit of the address space is none of the cases:
    there a mapped file counts as much.
    """
    import resource

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return ""
    return f"; mapped from their file they need less: set {MODE_VARIABLE}=map"


def _map(handle: int, nbytes: int) -> npt.NDArray[np.uint8]:
    pages = mmap.mmap(handle, nbytes, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_WILLNEED"):
        pages.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(pages, np.uint8, count=nbytes)


def _read(handle: int, nbytes: int, path: Path) -> npt.NDArray[np.uint8]:
    """Read the file into huge pages, by several threads: making the pages takes as long as
    copying.
    """
    memory = allocate(nbytes, huge=True)
    window = memory.data

    def fill(start: int) -> None:
        at, end = start, min(start + READ_BYTES, nbytes)
        while at < end:
            count = os.preadv(handle, [window[at:end]], at)
            if count == 0:
                raise ArtifactError(f"{path} was cut off: compile the model again")
            at += count

    with ThreadPoolExecutor(min(default_threads(), MOST_READERS)) as pool:
        list(pool.map(fill, range(0, nbytes, READ_BYTES)))
    memory.flags.writeable = False
    return memory


def huge_pages_offered(
    setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> bool:
    """Whether the system gives huge pages to who asks for them."""
    try:
        text = setting.read_text()
    except OSError:
        return False
    return "[madvise]" in text or "[always]" in text


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be had without swapping; 0 where the system doesn't tell."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0
