"""What this machine's CPU can do, and how many of its cores this process may use.

Needs neither LLVM nor torch: an artifact is checked with it before its code is mapped.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bessemer.errors import UsageError

THREADS_VARIABLE = "BESSEMER_THREADS"
# More workers than any machine has cores; each takes a stack and a part of the scratch memory.
# The C API has the same limit.
MOST_THREADS = 1024

_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
_CPUINFO_KEYS = ("flags", "features")
# macOS's names, lower case, where they differ from those of /proc/cpuinfo.
_DARWIN_NAMES = {
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "avx1.0": "avx",
    "lzcnt": "abm",
    "feat_lse": "atomics",
    "feat_rdm": "asimdrdm",
    "feat_dotprod": "asimddp",
    "feat_fp16": "asimdhp",
    "feat_fhm": "asimdfhm",
    "feat_lrcpc": "lrcpc",
    "feat_jscvt": "jscvt",
    "feat_fcma": "fcma",
    "feat_bf16": "bf16",
    "feat_i8mm": "i8mm",
}


def host_arch() -> str:
    """`x86_64`, `aarch64`, `riscv64`, or whatever else the system calls itself."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself."""
    try:
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def host_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU's features, by the names of /proc/cpuinfo.

    Where processors differ, those that all have. Empty where the system does not tell.
    """
    if sys.platform == "darwin" and cpuinfo == Path("/proc/cpuinfo"):
        return _darwin_features()
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    return parse_cpuinfo(text)


def parse_cpuinfo(text: str) -> frozenset[str]:
    """The features that every processor in the text of /proc/cpuinfo has."""
    common: frozenset[str] | None = None
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        key = key.strip().lower()
        if not colon:
            continue
        if key in _CPUINFO_KEYS:
            found = frozenset(value.split())
        elif key == "isa":
            found = _riscv_extensions(value.strip().lower())
        else:
            continue
        common = found if common is None else common & found
    return common or frozenset()


def _riscv_extensions(isa: str) -> frozenset[str]:
    """`rv64imafdc_zba_zbb` -> i m a f d c zba zbb. `g` stands for imafd."""
    single, *others = isa.split("_")
    letters = set(single.removeprefix("rv64").removeprefix("rv32"))
    if "g" in letters:
        letters |= set("imafd")
    names = letters | set(others)
    if "zfh" in names:
        names.add("zfhmin")
    if "zvfh" in names:
        names.add("zvfhmin")
    return frozenset(names)


def _darwin_features() -> frozenset[str]:
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return frozenset()
    return parse_sysctl(done.stdout)


def parse_sysctl(text: str) -> frozenset[str]:
    """Features from the output of `sysctl machdep.cpu hw.optional`, by /proc/cpuinfo's names."""
    names: set[str] = set()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        leaf = key.strip().rsplit(".", 1)[-1].lower()
        if leaf.endswith("features"):
            names.update(value.lower().split())
        elif key.strip().startswith("hw.optional") and value.strip() == "1":
            names.add(leaf)
    if any(name.startswith("feat_") or name == "neon" for name in names):
        names.update(("fp", "asimd"))
    return frozenset(_DARWIN_NAMES.get(name, name) for name in names)


def missing_features(required: Iterable[str], host: frozenset[str] | None = None) -> list[str]:
    """Those of `required` (names of /proc/cpuinfo) that this CPU lacks, sorted.

    `host` defaults to `host_features()`. Where the system tells nothing there is nothing to
    compare with, and the list is empty.
    """
    have = host_features() if host is None else host
    if not have and host is None:
        return []
    return sorted(set(required) - have)


def default_threads(
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    affinity: int | None = None,
) -> int:
    """How many threads to use: the cores of the affinity mask, within the cgroup's CPU quota.

    The quota is rounded down, but to 1 at least. The environment variable BESSEMER_THREADS
    overrides it; a value that is no whole number from 1 to 1024 is a UsageError. `environ`, `root`
    (of /proc and /sys) and `affinity` replace what is read from the system.
    """
    variables = os.environ if environ is None else environ
    wanted = variables.get(THREADS_VARIABLE, "").strip()
    if wanted:
        whole = wanted.isascii() and wanted.isdigit() and len(wanted) < 20
        if not whole or not 1 <= int(wanted) <= MOST_THREADS:
            raise UsageError(
                f"{THREADS_VARIABLE} is '{wanted}': it must be a whole number from 1 to "
                f"{MOST_THREADS}"
            )
        return int(wanted)
    cores = _affinity() if affinity is None else affinity
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the cgroups of this process allow (v1 and v2); None: no limit.

    The tightest limit on the way from the process's own group to the root counts.
    """
    quotas = []
    for controllers, group in _groups(root):
        if controllers == "":
            for folder in _upwards(root / "sys/fs/cgroup", group):
                quotas.append(_quota_v2(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for mount in dict.fromkeys((controllers, "cpu,cpuacct", "cpu")):
                for folder in _upwards(root / "sys/fs/cgroup" / mount, group):
                    quotas.append(_quota_v1(folder))
    return min((q for q in quotas if q is not None), default=None)


def _groups(root: Path) -> Iterator[tuple[str, str]]:
    """(controllers, path) of each line of /proc/self/cgroup; v2's has no controllers."""
    try:
        text = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield parts[1], parts[2]


def _upwards(mount: Path, group: str) -> Iterator[Path]:
    """The group's folder and its parents up to the mount point.

    In a container the path may be the host's, which is not mounted: its folders don't exist, and
    the mount point itself is the container's group.
    """
    parts = [p for p in group.split("/") if p not in ("", "..", ".")]
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _quota_v2(path: Path) -> float | None:
    try:
        quota, period = path.read_text(encoding="ascii").split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        period = int((folder / "cpu.cfs_period_us").read_text(encoding="ascii"))
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
