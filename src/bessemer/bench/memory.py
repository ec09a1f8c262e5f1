"""What a process takes of the memory, in bytes."""

from __future__ import annotations

import sys
from pathlib import Path

_STATUS_KEYS = {"VmHWM": "rss_peak", "VmRSS": "rss"}


def process_memory(proc: Path = Path("/proc/self")) -> dict[str, int]:
    """rss_peak: the most that was resident, shared file pages included.  rss: resident now.
    private: of that, what no other process shares.  The last two only where /proc has them.
    """
    found = _kilobytes(proc / "status", _STATUS_KEYS)
    private = _kilobytes(
        proc / "smaps_rollup", {"Private_Clean": "clean", "Private_Dirty": "dirty"}
    )
    if private:
        found["private"] = sum(private.values())
    if "rss_peak" not in found:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["rss_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return found


def _kilobytes(path: Path, keys: dict[str, str]) -> dict[str, int]:
    """`Key: 123 kB` lines of a file of /proc, in bytes, under the names that `keys` gives."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        key, _, value = line.partition(":")
        if key in keys and value.split()[:1]:
            found[keys[key]] = int(value.split()[0]) * 1024
    return found
