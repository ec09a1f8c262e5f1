"""CPU features and thread counts, read from injected files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.errors import UsageError
from bessemer.runtime import cpu


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def threads(root: Path, cores: int = 8, value: str | None = None) -> int:
    return cpu.default_threads({} if value is None else {"BESSEMER_THREADS": value}, root, cores)


def test_no_cgroup(tmp_path: Path) -> None:
    assert threads(tmp_path, 8) == 8
    assert threads(tmp_path, 1) == 1


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("150000 100000", 1),
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("max 100000", 8),
        ("1600000 100000", 8),
        ("garbage", 8),
        ("100000 0", 8),
        ("", 8),
    ],
)
def test_cgroup_v2(limit: str, expected: int, tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/job\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/job/cpu.max", limit)
    assert threads(tmp_path) == expected


def test_cgroup_v2_parent_limits_too(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/slice/job\n")
    write(tmp_path, "sys/fs/cgroup/slice/job/cpu.max", "max 100000")
    write(tmp_path, "sys/fs/cgroup/slice/cpu.max", "300000 100000")
    assert threads(tmp_path) == 3


def test_cgroup_v2_of_a_container(tmp_path: Path) -> None:
    """The path in /proc is the host's; the mount point is the container's own group."""
    write(tmp_path, "proc/self/cgroup", "0::/../../docker/0123\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "200000 100000")
    assert threads(tmp_path) == 2


@pytest.mark.parametrize(
    ("quota", "period", "expected"),
    [("150000", "100000", 1), ("200000", "100000", 2), ("-1", "100000", 8), ("x", "y", 8)],
)
@pytest.mark.parametrize("folder", ["cpu,cpuacct/job", "cpu/job", "cpu,cpuacct", "cpu"])
def test_cgroup_v1(folder: str, quota: str, period: str, expected: int, tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "12:memory:/job\n4:cpu,cpuacct:/job\n0::/\n")
    write(tmp_path, f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us", quota)
    write(tmp_path, f"sys/fs/cgroup/{folder}/cpu.cfs_period_us", period)
    assert threads(tmp_path) == expected


def test_override_wins(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000")
    assert threads(tmp_path, 8) == 1
    assert threads(tmp_path, 8, "5") == 5
    assert threads(tmp_path, 8, " 16 ") == 16
    assert threads(tmp_path, 8, "") == 1


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "²"])
def test_bad_override(value: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="BESSEMER_THREADS is"):
        threads(tmp_path, 8, value)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_affinity_of_this_process() -> None:
    """One CPU in the mask: one thread."""
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "from bessemer.runtime.cpu import default_threads; print(default_threads({}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_x86_features(tmp_path: Path) -> None:
    """Those that every processor has."""
    path = tmp_path / "cpuinfo"
    path.write_text(
        "processor\t: 0\nmodel name\t: Some: CPU\nflags\t\t: fpu avx avx2 fma\nbugs\t: x\n\n"
        "processor\t: 1\nflags\t\t: fpu avx fma\n"
    )
    assert cpu.host_features(path) == {"fpu", "avx", "fma"}
    assert cpu.missing_features(["avx2", "fma", "avx512f"], cpu.host_features(path)) == [
        "avx2",
        "avx512f",
    ]


def test_arm_and_riscv_features() -> None:
    arm = "processor : 0\nFeatures : fp asimd asimddp\nCPU architecture: 8\n"
    assert cpu.parse_cpuinfo(arm) == {"fp", "asimd", "asimddp"}
    riscv = "hart : 0\nisa : rv64imafdcv_zicsr_zfh_zba\nmmu : sv39\n"
    assert {"m", "v", "zfh", "zfhmin", "zba"} <= cpu.parse_cpuinfo(riscv)


def test_macos_features() -> None:
    intel = (
        "machdep.cpu.features: FPU SSE3 SSSE3 SSE4.1 FMA AVX1.0 F16C\n"
        "machdep.cpu.leaf7_features: AVX2 BMI1 BMI2\n"
        "machdep.cpu.extfeatures: LZCNT\n"
        "machdep.cpu.brand_string: Intel\n"
    )
    assert {"pni", "sse4_1", "avx", "avx2", "bmi1", "abm", "f16c"} <= cpu.parse_sysctl(intel)
    apple = "hw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_BF16: 0\nhw.optional.neon: 1\n"
    assert {"asimddp", "fp", "asimd"} <= cpu.parse_sysctl(apple)
    assert "bf16" not in cpu.parse_sysctl(apple)


def test_unreadable_cpuinfo(tmp_path: Path) -> None:
    assert cpu.host_features(tmp_path / "none") == frozenset()
    (tmp_path / "empty").write_text("")
    assert cpu.host_features(tmp_path / "empty") == frozenset()


def test_this_machine() -> None:
    assert cpu.missing_features([]) == []
    if cpu.host_features():
        assert cpu.missing_features(["no_such_feature"]) == ["no_such_feature"]


def test_needs_neither_llvm_nor_torch() -> None:
    code = (
        "import sys, bessemer.runtime.cpu;"
        "print([m for m in ('llvmlite', 'mlir', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
