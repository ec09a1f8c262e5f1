"""Probes of the machine, and what the system tells about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bessemer.backend.codegen import compile_module
from bessemer.backend.target import Target
from bessemer.bench.machine import Peaks, Probes, fma_probe, last_cache_bytes, read_probe
from bessemer.bench.memory import process_memory

MIB = 1 << 20


def test_probes_run_on_this_machine() -> None:
    probes = Probes(read_bytes=4 * MIB)
    for threads in (1, 3):
        peaks = probes.measure(threads, repeat=1)
        assert peaks.threads == threads
        # Slower than any processor of today, and faster than any: the units are right.
        assert 1e8 < peaks.flops < 1e14
        assert 1e8 < peaks.bytes < 1e13


@pytest.mark.parametrize("machine", ["x86_64", "aarch64", "riscv64"])
def test_probes_are_loops_of_what_they_measure(machine: str) -> None:
    target = Target.parse(machine)
    for text, name in ((fma_probe(target), "fma"), (read_probe(target), "read")):
        module = compile_module(text, target, name, exports=[name])
        assert f"@{name}(" in module.llvm_ir
    loop = compile_module(fma_probe(target), target, "fma", exports=["fma"]).llvm_ir
    assert "llvm.fma" in loop or "llvm.fmuladd" in loop


def test_the_better_of_two_measurements() -> None:
    assert Peaks(2, 5.0, 1.0).best(Peaks(2, 3.0, 4.0)) == Peaks(2, 5.0, 4.0)


def test_largest_cache(tmp_path: Path) -> None:
    for i, text in enumerate(("32K\n", "512K\n", "32M\n", "odd\n")):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(text)
    assert last_cache_bytes(tmp_path) == 32 * MIB
    assert last_cache_bytes(tmp_path / "nowhere") == 0


def test_memory_of_a_process(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t   2048 kB\nVmRSS:\t 1024 kB\n")
    (tmp_path / "smaps_rollup").write_text("Private_Clean: 4 kB\nPrivate_Dirty:  8 kB\nPss: 1 kB\n")
    assert process_memory(tmp_path) == {"rss_peak": 2 * MIB, "rss": MIB, "private": 12 * 1024}


def test_memory_without_proc(tmp_path: Path) -> None:
    assert process_memory(tmp_path / "nowhere")["rss_peak"] > MIB
