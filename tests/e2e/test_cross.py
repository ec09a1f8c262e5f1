"""Code for other processors: what is in it, and that it computes what the code for this one does.

Needs Debian's packages qemu-user, libc6-arm64-cross and libc6-riscv64-cross.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bessemer.backend import link
from bessemer.backend.target import Target
from bessemer.standalone import RUNNER_FILE, Runner
from bessemer.verify.binaries import read_archive, read_library
from bessemer.verify.files import TOOLCHAIN_SYMBOLS, api_symbols
from tests.e2e.compiled import compiled, load, token_ids
from tests.e2e.cross import assembly, compilation, emulator, libraries, program
from tests.e2e.mach_o import EXECUTE, MAIN, PIE, read_mach_o
from tests.runtime import tiny_tokenizers

# The same f32 sums in another order, with other instructions.
TOLERANCE = 2e-5
IDS = token_ids(20, seed=3)
PREFILL = 14


def model(weights: str) -> Path:
    """Soft caps, windows and a tied head."""
    return compiled("gemma2", weights=weights)


@cache
def expected(weights: str) -> np.ndarray:
    session = load("gemma2", weights=weights).session()
    rows = [session.prefill(IDS[:PREFILL], all_logits=True)]
    return np.concatenate([*rows, *(session.decode(token)[None] for token in IDS[PREFILL:])])


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@dataclass(frozen=True)
class Case:
    """instructions: what must be in the code.  processors: emulated ones, by qemu's names."""

    triple: str
    cpu: str | None
    weights: str
    instructions: tuple[str, ...]
    processors: tuple[str, ...]


CASES = {
    "neon": Case("aarch64-linux-gnu", None, "f16", (r"fmla\tv\d+\.4s", "fcvtl"), ("cortex-a53",)),
    "dotprod": Case(
        "aarch64-linux-gnu",
        "baseline+dotprod+fullfp16",
        "q8_0",
        (r"fmla\tv\d+\.4s", r"[su]mlal"),
        ("cortex-a76",),
    ),
    "rv64": Case("riscv64-linux-gnu", None, "f16", (r"fmadd\.s",), ("rv64",)),
    "rvv": Case(
        "riscv64-linux-gnu",
        "baseline+v",
        "f16",
        (r"vfmacc\.v[fv]|vfmadd\.v[fv]", "vsetivli", r"vle32\.v"),
        ("rv64,v=true,vlen=128", "rv64,v=true,vlen=256"),
    ),
    "rvv integers": Case(
        "riscv64-linux-gnu",
        "baseline+v",
        "q8_0",
        (r"vwmul|vwmacc|vmul\.v", "vsetivli"),
        ("rv64,v=true,vlen=128",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_other_processors(name: str, tmp_path: Path) -> None:
    """The instructions are in the code, and emulated it gives the logits of this processor."""
    case = CASES[name]
    folder, target = model(case.weights), Target.parse(case.triple, case.cpu)
    made = compilation(folder, target, assembly=True)
    text = assembly(made)
    for wanted in case.instructions:
        assert re.search(wanted, text), wanted
    emulated = [emulator(target.arch, processor) for processor in case.processors]
    built = program(folder, made, tmp_path / "program")
    for command in emulated:
        got = built.logits(IDS, PREFILL, emulator=command)
        assert error(got, expected(case.weights)) < TOLERANCE, command


def test_macos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries and header for a system whose objects are of another kind, with a prefix; and the
    runner. No C file of ours has a warning there.
    """
    monkeypatch.setattr(link, "_C_FLAGS", (*link._C_FLAGS, "-Werror"))
    folder, target = model("f16"), Target.parse("aarch64-macos")
    made = compilation(folder, target, assembly=True)
    assert re.search(r"fmla\.4s", assembly(made))
    place, code, description = libraries(folder, made, tmp_path / "mac", "one_")
    wanted = {"one__mlir_ciface_forward_prefill", "one__mlir_ciface_forward_decode"}
    wanted |= api_symbols("one_")
    exports = read_library(place / "model.so").exports
    assert exports - TOOLCHAIN_SYMBOLS == wanted
    assert wanted <= read_archive(place / "libmodel.a").symbols
    assert read_library(place / "model.so").needed == ("libSystem.B.dylib",)
    assert str(tmp_path).encode() not in (place / "model.so").read_bytes()

    tiny_tokenizers.write(place, tiny_tokenizers.byte_level())
    Runner(target, False, tmp_path / "work").write(code, description, place)
    program = read_mach_o(place / RUNNER_FILE)
    assert (program.cpu, program.kind) == ("aarch64", EXECUTE)
    assert program.flags & PIE
    assert len(program.commands[MAIN]) == 1
    assert program.libraries == ["/usr/lib/libSystem.B.dylib"]
    assert program.least_system == (11, 0)
    program.check_signature()
