"""Targets: parsing, features, and the manifest's entry."""

from __future__ import annotations

import itertools
import json

import pytest

from bessemer.backend.codegen import compile_module
from bessemer.backend.target import Target
from bessemer.errors import CompileError
from bessemer.runtime import cpu

from .support import elementwise

MACHINES = {"x86_64": 62, "aarch64": 183, "riscv64": 243}
BODY = "%y = arith.extf %x : {S} to {R}\n%z = math.exp %y : {R}\n%r = math.tan %z : {R}"


def elf_machine(data: bytes) -> int:
    assert data[:4] == b"\x7fELF"
    return int.from_bytes(data[18:20], "little")


def test_native_runs_here() -> None:
    target = Target.parse()
    assert target == Target.native()
    assert target.arch == cpu.host_arch()
    assert target.is_native
    assert cpu.missing_features(target.required_features()) == []


def test_native_features_are_what_the_cpu_reports() -> None:
    """Read from CPUID by LLVM, from /proc/cpuinfo by us: the same set of known names."""
    from bessemer.backend import features

    target = Target.native()
    names = features.cpuinfo_names(target.arch)
    expected = {names[f] for f in features.known(target.arch)} & cpu.host_features()
    assert expected - set(target.required_features()) <= {
        names[f] for f in features.baseline(target.arch)
    }


def test_baseline_needs_nothing() -> None:
    for text in ("x86_64", "aarch64", "riscv64"):
        target = Target.parse(text, "baseline")
        assert target.required_features() == []
        assert target.f32_lanes == 4
        assert target == Target.parse(text)
    assert not Target.parse("x86_64").has_fma
    assert not Target.parse("x86_64").has_f16c
    assert Target.parse("aarch64").has_f16c
    assert not Target.parse("riscv64").has_f16c


def test_named_cpu_has_an_explicit_feature_list() -> None:
    target = Target.parse("x86_64", "x86-64-v3")
    assert {"avx2", "fma", "f16c", "bmi2", "lzcnt"} <= set(target.features)
    assert "avx512f" not in target.features
    assert target.required_features() == [
        *("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "pni", "popcnt"),
        *("sse4_1", "sse4_2", "ssse3"),
    ]
    assert (target.f32_lanes, target.has_fma, target.has_f16c) == (8, True, True)
    server = Target.parse("x86_64-linux-gnu", "znver4")
    assert "avx512_vnni" in server.required_features()
    assert (server.f32_lanes, server.vector_registers) == (16, 32)
    assert "asimddp" in Target.parse("aarch64", "neoverse-n1").required_features()


def test_levels_of_x86_64() -> None:
    """Short names, and several of them: each level has what the one before has."""
    assert Target.parse("x86_64", "v3") == Target.parse("x86_64-linux-gnu", "x86-64-v3")
    levels = Target.parse_levels("x86_64", "v4,baseline, v2,v3,v3")
    assert [t.level for t in levels] == ["v1", "v2", "v3", "v4"]
    assert all(set(a.features) < set(b.features) for a, b in itertools.pairwise(levels))
    assert [t.f32_lanes for t in levels] == [4, 4, 8, 16]
    assert [t.vector_registers for t in levels] == [16, 16, 16, 32]
    assert Target.parse("x86_64", "v3,v2") == levels[1]
    assert Target.parse_levels("aarch64") == (Target.parse("aarch64"),)
    for target, names in (("aarch64", "v2,v3"), ("x86_64", "v3,znver3"), ("x86_64", "v2,")):
        with pytest.raises(CompileError, match="only levels of x86-64 can be listed"):
            Target.parse_levels(target, names)


def test_features_after_the_name() -> None:
    """`NAME+feature`, with what the feature implies; unknown ones are an error that lists all."""
    vector = Target.parse("riscv64", "baseline+v")
    assert vector.cpu == "generic-rv64"
    assert set("mafdcv") <= set(vector.features)
    assert vector.required_features() == ["v"]
    assert (vector.f32_lanes, vector.vector_registers) == (8, 16)
    assert not vector.has_f16c
    assert Target.parse("riscv64", "baseline+v+zfhmin+zvfhmin").has_f16c
    assert "asimddp" in Target.parse("aarch64", "baseline+dotprod").required_features()
    assert {"avx2", "avx512f"} <= set(Target.parse("x86_64", "baseline+avx512f").features)
    for wrong in ("baseline+neon2", "native+v", "baseline+", "+v"):
        with pytest.raises(CompileError):
            Target.parse("riscv64", wrong)
    with pytest.raises(CompileError, match=r"has no feature dotprod; known: .*zvfhmin"):
        Target.parse("riscv64", "baseline+dotprod")


def test_triples_of_other_systems() -> None:
    assert Target.parse("aarch64-linux-gnu") == Target.parse("aarch64")
    assert Target.parse("riscv64-linux-musl").triple == "riscv64-unknown-linux-musl"
    mac = Target.parse("arm64-macos")
    assert (mac.triple, mac.system) == ("aarch64-apple-macosx11.0.0", "darwin")
    assert Target.parse("aarch64-apple-darwin").triple == "aarch64-apple-darwin"


def test_features_decide_not_the_name() -> None:
    """A CPU name whose features a VM hides: what is not listed is not used."""
    full = Target.parse("x86_64", "znver3")
    hidden = Target(full.triple, full.cpu, tuple(f for f in full.features if "avx" not in f))
    hidden = Target(
        hidden.triple, hidden.cpu, tuple(f for f in hidden.features if f not in ("fma", "f16c"))
    )
    text = elementwise("%y = arith.mulf %x, %x : {S}\n%r = arith.addf %y, %x : {S}")
    assert "%ymm" in (compile_module(text, full, "full", assembly=True).assembly or "")
    assembly = compile_module(text, hidden, "hidden", assembly=True).assembly or ""
    assert "%xmm" in assembly
    assert "%ymm" not in assembly
    assert "\tv" not in assembly


@pytest.mark.parametrize(
    ("target", "name", "message"),
    [
        ("native", "pentium-vii", "--cpu pentium-vii: unknown for"),
        ("native", "$(touch x)", "--cpu $(touch x): no name"),
        ("sparc", None, "--target sparc: unknown"),
        ("x86_64-plan9", None, "--target x86_64-plan9: unknown"),
        ("windows", None, "--target windows: unknown; write native, an architecture (x86_64, "),
        ("x86_64-windows-gnu", None, "--target x86_64-windows-gnu: unknown; write native, an "),
        ("x86_64-pc-windows-msvc", None, "--target x86_64-pc-windows-msvc: unknown"),
        ("aarch64-unknown-freebsd", None, "--target aarch64-unknown-freebsd: unknown"),
        ("x86_64", "v5", "--cpu v5: unknown for x86_64; use native, baseline, v2, v3, v4 (or sev"),
        ("x86_64-linux-gnu;x", None, "--target "),
        ("", None, "--target "),
    ],
)
def test_unknown_names(target: str, name: str | None, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        Target.parse(target, name)
    assert str(caught.value).startswith(message)


def test_native_cpu_of_another_machine_is_refused() -> None:
    other = "riscv64" if cpu.host_arch() != "riscv64" else "aarch64"
    with pytest.raises(CompileError, match="--cpu native is this machine"):
        Target.parse(other, "native")


def test_json_round_trip() -> None:
    target = Target.parse("aarch64", "neoverse-n1")
    data = json.loads(json.dumps(target.to_json()))
    assert Target.from_json(data) == target
    for broken in ({}, {**data, "features": None}, {**data, "cpu": 3}):
        with pytest.raises(CompileError, match="malformed"):
            Target.from_json(broken)


@pytest.mark.parametrize("arch", MACHINES)
def test_cross_compilation(arch: str) -> None:
    text = elementwise(BODY, "vector", "f16", "f32")
    compiled = compile_module(text, Target.parse(arch), "cross", assembly=True)
    assert elf_machine(compiled.object) == MACHINES[arch]
    assert "tanf" in (compiled.assembly or "")
    # Conversions and exp are written out: no compiler runtime is needed.
    assert "__extendhfsf2" not in (compiled.assembly or "")
    assert "expf" not in (compiled.assembly or "")
    if arch == "riscv64":
        assert compiled.object[48] & 0x6 == 0x4  # e_flags: double-float ABI
