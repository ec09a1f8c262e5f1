"""Code for other processors: what is in it, and that it computes what the code for this one does.

Needs Debian's packages qemu-user, libc6-arm64-cross and libc6-riscv64-cross.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from bessemer.backend.target import Target
from tests.e2e.compiled import compiled, load, token_ids
from tests.e2e.cross import assembly, compilation, emulator, program

# The same f32 sums in another order, with other instructions.
TOLERANCE = 2e-5
IDS = token_ids(20, seed=3)
PREFILL = 14


@pytest.fixture(scope="module")
def folder() -> Path:
    """Soft caps, windows and a tied head; weights are converted from f16."""
    return compiled("gemma2", weights="f16")


@pytest.fixture(scope="module")
def expected(folder: Path) -> np.ndarray:
    session = load("gemma2", weights="f16").session()
    rows = [session.prefill(IDS[:PREFILL], all_logits=True)]
    return np.concatenate([*rows, *(session.decode(token)[None] for token in IDS[PREFILL:])])


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


CASES = {
    # target, cpu, instructions that must be there, emulated processors
    "neon": ("aarch64-linux-gnu", None, r"fmla\tv\d+\.4s", ("aarch64", ["cortex-a53"])),
    "dotprod": (
        "aarch64-linux-gnu",
        "baseline+dotprod+fullfp16",
        r"fmla\tv\d+\.4s",
        ("aarch64", ["cortex-a76"]),
    ),
    "rv64": ("riscv64-linux-gnu", None, r"fmadd\.s", ("riscv64", ["rv64"])),
    "rvv": (
        "riscv64-linux-gnu",
        "baseline+v",
        r"vfmacc\.v[fv]|vfmadd\.v[fv]",
        ("riscv64", ["rv64,v=true,vlen=128", "rv64,v=true,vlen=256"]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_other_processors(case: str, folder: Path, expected: np.ndarray, tmp_path: Path) -> None:
    triple, cpu, wanted, (arch, processors) = CASES[case]
    made = compilation(folder, Target.parse(triple, cpu), assembly=True)
    assert re.search(wanted, assembly(made))
    built = program(folder, made, tmp_path / "program")
    for name in processors:
        got = built.logits(IDS, PREFILL, emulator=emulator(arch, name))
        assert error(got, expected) < TOLERANCE, name
