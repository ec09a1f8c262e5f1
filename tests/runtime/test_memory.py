"""Memory for weights, state and scratch."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import numpy as np
import pytest

from bessemer.runtime.memory import allocate
from bessemer.runtime.weights import huge_pages_offered

HUGE = 2 << 20


def mapping(memory: np.ndarray) -> dict[str, str]:
    """What Linux says of the mapping that holds `memory`: its line, as `map`, and its values."""
    at = memory.ctypes.data
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first:
            if found:
                break
            start, end = (int(number, 16) for number in first.split("-"))
            if start <= at < end:
                found["map"] = line
        elif found:
            found[first.rstrip(":")] = rest.strip()
    return found


@pytest.mark.parametrize("huge", [False, True])
def test_zero_at_page_boundaries(huge: bool) -> None:
    for nbytes in (0, 1, 4097, 3 * HUGE + 5):
        memory = allocate(nbytes, huge=huge)
        assert memory.nbytes == nbytes
        assert not memory.any()
        assert memory.ctypes.data % mmap.PAGESIZE == 0
        memory[:] = 7


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
@pytest.mark.parametrize("huge", [False, True])
def test_it_is_memory_of_this_process_alone(huge: bool) -> None:
    """Shared memory gets no huge pages on most systems, whatever is asked for."""
    memory = allocate(8 * HUGE, huge=huge)
    memory[:: mmap.PAGESIZE] = 1
    found = mapping(memory)
    assert found["map"].split()[4] == "0", (
        found
    )  # no file, not even a nameless one of shared memory
    if huge and huge_pages_offered():
        assert "hg" in found["VmFlags"].split()
