"""AVX-512 code, run by an emulated processor: what it computes is what this one computes.

Needs Debian's packages bochs and bochsbios.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bessemer.backend.target import Target
from bessemer.backend.tools import run_tool
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.runtime.model import Model
from tests.e2e import bochs
from tests.e2e.compiled import compiled, reference, tiny_pair
from tests.e2e.cross import Program, assembly, compilation, program, zig_cc, zig_environment
from tests.e2e.test_cross import IDS, PREFILL, TOLERANCE, error

TRIPLE = "x86_64-linux-musl"
CONTEXT = 80
# Against PyTorch, as in test_levels.py.
ERROR = 1e-4


@pytest.fixture(autouse=True)
def emulator() -> None:
    bochs.require()


@dataclass(frozen=True)
class Case:
    """instructions: what must be in the code."""

    weights: str
    cpu: str
    instructions: tuple[str, ...]
    model: str = "gemma2"

    @property
    def folder(self) -> Path:
        return compiled(self.model, weights=self.weights)


CASES = {
    "f32": Case("f32", "v4", (r"vfmadd\d+ps\t.*%zmm(1[6-9]|2\d|3[01])",)),
    "f16": Case("f16", "v4", (r"vcvtph2ps\t.*%zmm", r"vfmadd\d+ps\t.*%zmm")),
    "bf16": Case("bf16", "v4", (r"vpmovzxwd\t.*%zmm", r"vfmadd\d+ps\t.*%zmm")),
    "q8_0": Case("q8_0", "v4", (r"vpmaddwd\t.*%zmm",)),
    "q8_0 with VNNI": Case("q8_0", "icelake-client", (r"vpdpwssd\t.*%zmm",)),
    # Its choice of experts is what LLVM writes wrongly, see `_trusted_machine` of backend.codegen.
    "gpt-oss": Case("f32", "icelake-client", (), "gpt_oss"),
}
THREADS = (1, 2, 3)
# By weights: against this processor's 8 lanes. The rows that q8_0 is multiplied with are rounded to
# 16 bits, where another last bit before can be another number.
TOLERANCES = {"f32": TOLERANCE, "f16": TOLERANCE, "bf16": TOLERANCE, "q8_0": 3e-4}


class WithoutPairs(Target):
    """The kernels of AVX-512, but for its own instruction, which other processors lack."""

    pair_dot = ""  # type: ignore[assignment]


@cache
def lowered_here(folder: Path) -> np.ndarray:
    """The logits by the same kernels of 16 lanes, lowered for this processor."""
    wide = Target.parse("x86_64", "v4")
    code = WithoutPairs(wide.triple, wide.cpu, wide.features)
    made = compilation(folder, Target.native(), code=code)
    with tempfile.TemporaryDirectory() as out:
        return program(folder, made, Path(out) / "program").logits(IDS, PREFILL)


@cache
def expected(folder: Path) -> np.ndarray:
    """The logits by this processor's own kernels."""
    session = Model.load(folder, threads=2).session()
    rows = [session.prefill(IDS[:PREFILL], all_logits=True)]
    return np.concatenate([*rows, *(session.decode(token)[None] for token in IDS[PREFILL:])])


def programs(out: Path) -> dict[str, Program]:
    """The tiny model with the driver for each case; what its code must hold is in it."""
    built = {}
    for number, (name, case) in enumerate(CASES.items()):
        made = compilation(case.folder, Target.parse(TRIPLE, case.cpu), assembly=True)
        for wanted in case.instructions:
            assert re.search(wanted, assembly(made)), (name, wanted)
        built[name] = program(case.folder, made, out / f"program{number}")
    return built


def emulated(out: Path) -> dict[tuple[str, int], bochs.Done]:
    """What every program gives with every number of threads: all in one run of the PC."""
    files: dict[str, Path | bytes] = {}
    commands = []
    for name, one in programs(out).items():
        words = [f"/{name}", f"/{name}.weights", f"/{name}.header"]
        files |= dict(zip(words, (one.path, one.weights, one.header), strict=True))
        commands += [[*words, threads, PREFILL, *IDS] for threads in THREADS]
    done = bochs.run(files, commands, out / "pc")
    return dict(zip(itertools.product(CASES, THREADS), done, strict=True))


def test_logits(tmp_path: Path) -> None:
    """A prefill and decodes: as near this processor's logits as another order of sums allows, and
    the same bits as the same kernels have here, by one thread and by several.
    """
    for (name, threads), done in emulated(tmp_path).items():
        case, where = CASES[name], (name, threads)
        assert done.status == 0, (where, done)
        got = np.frombuffer(done.stdout, np.float32).reshape(len(IDS), -1)
        assert error(got, expected(case.folder)) < TOLERANCES[case.weights], where
        assert np.array_equal(got, lowered_here(case.folder)), where


# Opens the model by the C API, once levels of its code that the first word names are no code any
# more (in the emulated PC all memory may be written), and writes the logits behind the ids.
LEVELS_PROGRAM = """
#include "model.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ENTRY(name, start) extern char name[] __asm__(start "_mlir_ciface_forward_prefill")
ENTRY(two, "");
ENTRY(three, "v3_");
ENTRY(four, "v4_");

int main(int n, char **a) {
    bsm_model *model;
    bsm_session *session;
    bsm_error error;
    int32_t ids[64];
    if (strchr(a[1], '2')) memcpy(two, "\\x0f\\x0b", 2);
    if (strchr(a[1], '3')) memcpy(three, "\\x0f\\x0b", 2);
    if (strchr(a[1], '4')) memcpy(four, "\\x0f\\x0b", 2);
    for (int i = 2; i < n; i++) ids[i - 2] = atoi(a[i]);
    if (bsm_open("/weights.bin", NULL, &model, &error) ||
        bsm_session_create(model, &session, &error) ||
        bsm_prefill(session, ids, n - 2, &error)) {
        fprintf(stderr, "%s\\n", error.message);
        return (int)error.status;
    }
    fwrite(bsm_logits(session), sizeof(float), BSM_VOCAB, stdout);
    return fflush(stdout) != 0;
}
"""


def levels(out: Path) -> dict[str, Path | bytes]:
    """A model with three levels in the program above, and its weights."""
    options = CompileOptions("f32", "f32", CONTEXT, chunk=16, target=TRIPLE, cpu="v2,v3,v4")
    folder = compile_model(tiny_pair("gemma2")[1], options, out / "model")
    (out / "program.c").write_text(LEVELS_PROGRAM)
    command = [*zig_cc(Target.parse(TRIPLE)), f"-I{folder}", str(out / "program.c")]
    command += [str(folder / "libmodel.a"), "-lm", "-lpthread", "-o", str(out / "program")]
    run_tool(command, env=zig_environment())
    return {"/program": out / "program", "/weights.bin": folder / "weights.bin"}


def test_best_level(tmp_path: Path) -> None:
    """The C API takes the best level of the processor, and no other one's code is run."""
    files, want = levels(tmp_path), reference(tiny_pair("gemma2")[1], IDS)[-1]
    for cpu, best in ((bochs.ICELAKE, "4"), (bochs.SKYLAKE, "4"), (bochs.HASWELL, "3")):
        others = "234".replace(best, "")
        commands = [["/program", broken, *IDS] for broken in (others, best)]
        good, bad = bochs.run(files, commands, tmp_path / cpu, cpu=cpu)
        assert good.status == 0, (cpu, good)
        got = np.frombuffer(good.stdout, np.float32)
        assert np.linalg.norm(got - want) < ERROR * np.linalg.norm(want), cpu
        assert bad.status < 0, cpu
        assert b"exception" in bad.stderr
