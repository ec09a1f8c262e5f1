"""Code for several levels of x86-64 in one library, and code that this processor can't run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bessemer.artifact.reader import open_artifact
from bessemer.backend import link
from bessemer.backend.target import Target
from bessemer.backend.tools import run_tool
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.errors import ArtifactError, UsageError
from bessemer.inspect.overview import overview
from bessemer.inspect.subject import open_subject
from bessemer.runtime import cpu, library
from bessemer.runtime.model import Model
from bessemer.verify.binaries import read_library
from bessemer.verify.files import check_symbols
from bessemer.verify.report import Report
from tests.e2e.compiled import reference, tiny_pair, token_ids
from tests.e2e.cross import compilation, program

pytestmark = pytest.mark.skipif(
    Target.native().arch != "x86_64", reason="levels of x86-64 need an x86-64 processor"
)

MODEL = "gemma2"
CONTEXT = 80
ERROR = 1e-4
IDS = token_ids(20, seed=3)
# Registers of each level; those of a level are in its code and in no lesser one's.
REGISTERS = {"v2": "xmm", "v3": "ymm", "v4": "zmm"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = CompileOptions("f32", "f32", CONTEXT, chunk=16, cpu="v2,v3,v4", emit=("asm",))
    made = tmp_path_factory.mktemp("levels") / "model"
    return compile_model(tiny_pair(MODEL)[1], options, made)


def logits(folder: Path) -> np.ndarray:
    session = Model.load(folder, threads=2).session()
    rows = [session.prefill(IDS[:14], all_logits=True)]
    return np.concatenate([*rows, *(session.decode(token)[None] for token in IDS[14:])])


def error(got: np.ndarray) -> float:
    want = reference(tiny_pair(MODEL)[1], IDS)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def test_each_level_is_in_the_library(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [level["cpu"] for level in manifest["levels"]] == ["x86-64-v4", "x86-64-v3"]
    assert manifest["target"]["cpu"] == "x86-64-v2"
    assert "avx" not in manifest["required_features"]
    exports = read_library(folder / "model.so").exports
    for level, register in REGISTERS.items():
        start = "" if level == "v2" else f"{level}_"
        assert f"{start}_mlir_ciface_forward_prefill" in exports
        place = folder / "ir" / ("" if level == "v2" else level)
        text = (place / "groups_prefill.s").read_text()
        assert f"%{register}" in text
        higher = [other for name, other in REGISTERS.items() if name > level]
        assert not any(f"%{other}" in text for other in higher)


def test_best_level_that_the_processor_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every level that can run here gives the logits; without the least it is an error."""
    manifest = json.loads((folder / "manifest.json").read_text())
    v3 = frozenset(manifest["levels"][1]["required_features"])
    v2 = frozenset(manifest["required_features"])
    have = cpu.host_features()
    taken: list[str] = []
    find = library.Library._symbol
    monkeypatch.setattr(
        library.Library,
        "_symbol",
        lambda self, path, name, *rest: taken.append(name) or find(self, path, name, *rest),
    )
    for features, start in ((v3, "v3_"), (v2, ""), (v2 | {"avx512f"}, "")):
        if not features - {"avx512f"} <= have:
            continue
        taken.clear()
        for module in (cpu, library):
            monkeypatch.setattr(module, "host_features", lambda *_, f=features: f)
        assert error(logits(folder)) < ERROR
        assert [n for n in taken if "forward" in n] == [
            f"{start}_mlir_ciface_forward_{phase}" for phase in ("prefill", "decode")
        ]
    monkeypatch.setattr(cpu, "host_features", lambda *_: v2 - {"sse4_2"})
    with pytest.raises(ArtifactError, match=r"a CPU with sse4_2, which this one lacks"):
        Model.load(folder)


def test_files_are_consistent(folder: Path) -> None:
    """`verify` knows the symbols of the levels, in the library and in the archive."""
    artifact = open_artifact(folder)
    report = Report(str(folder))
    check_symbols(report, artifact)
    assert [check.detail for check in report.failed] == []


def test_inspect_names_all(folder: Path) -> None:
    text = overview(open_subject(folder)).text
    assert "x86_64-unknown-linux-gnu, x86-64-v2, x86-64-v3, x86-64-v4" in text


def test_profile_is_for_one_processor(tmp_path: Path) -> None:
    options = CompileOptions(cpu="v2,v3", profile=True)
    with pytest.raises(UsageError, match="code that measures itself is for one CPU"):
        compile_model(tiny_pair(MODEL)[1], options, tmp_path / "x")


def test_sixteen_lanes(folder: Path, tmp_path: Path) -> None:
    """The kernels of AVX-512, 16 lanes and 32 registers, lowered for what this processor has: LLVM
    splits the vectors. For AVX-512 itself they are whole.
    """
    text = (folder / "ir/v4/groups_prefill.s").read_text()
    assert re.search(r"vfmadd\d+ps\t.*%zmm(1[6-9]|2\d|3[01])", text)
    made = compilation(folder, Target.native(), code=Target.parse("x86_64", "v4"))
    got = program(folder, made, tmp_path / "program").logits(IDS, 14)
    assert error(got) < ERROR


# Opens the model in the folder a[1] by the C API and writes the logits after the ids that follow.
PROGRAM = """
#include "model.h"
#include <stdio.h>
#include <stdlib.h>

int main(int n, char **a) {
    bsm_model *model;
    bsm_session *session;
    bsm_error error;
    int32_t ids[64];
    for (int i = 2; i < n; i++) ids[i - 2] = atoi(a[i]);
    if (bsm_open(a[1], NULL, &model, &error) || bsm_session_create(model, &session, &error) ||
        bsm_prefill(session, ids, n - 2, &error)) {
        fprintf(stderr, "%s\\n", error.message);
        return (int)error.status;
    }
    fwrite(bsm_logits(session), sizeof(float), BSM_VOCAB, stdout);
    return 0;
}
"""
NO_SUCH_CPU = 7  # BSM_ERROR_CPU


def embedded(folder: Path, out: Path) -> list[str]:
    """The program with the model of `folder` in it, as a command that lacks its ids."""
    (out / "program.c").write_text(PROGRAM)
    compiler, _ = link._compiler(Target.native())
    command = [*compiler, f"-I{folder}", str(out / "program.c"), str(folder / "libmodel.a")]
    run_tool([*command, "-lm", "-lpthread", "-o", str(out / "program")])
    return [str(out / "program"), str(folder)]


def run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    words = [*command, *map(str, IDS)]
    return subprocess.run(words, capture_output=True, check=False, timeout=300)


def test_levels_in_c(folder: Path, tmp_path: Path) -> None:
    """The C API takes the best level of this processor, and of emulated ones that have less."""
    command = embedded(folder, tmp_path)
    want = reference(tiny_pair(MODEL)[1], IDS)[-1]
    here = np.frombuffer(run(command).stdout, np.float32)
    assert np.linalg.norm(here - want) < ERROR * np.linalg.norm(want)
    if shutil.which("qemu-x86_64") is None:
        pytest.skip("qemu-x86_64 is not installed (Debian's package qemu-user)")
    # No AVX at all: an instruction of a better level would be a signal.
    old = run(["qemu-x86_64", "-cpu", "Nehalem", *command])
    assert old.returncode == 0, old.stderr
    got = np.frombuffer(old.stdout, np.float32)
    assert np.linalg.norm(got - want) < ERROR * np.linalg.norm(want)
    older = run(["qemu-x86_64", "-cpu", "qemu64,-popcnt", *command])
    assert older.returncode == NO_SUCH_CPU
    assert b"which this one lacks" in older.stderr


def test_no_signal_without_the_instructions(tmp_path: Path) -> None:
    """AVX-512 where there is none: Python and C say what is missing."""
    missing = "avx512_fp16"
    if missing in cpu.host_features():
        pytest.skip("this processor has all that sapphirerapids has")
    options = CompileOptions("f32", context=32, cpu="sapphirerapids")
    folder = compile_model(tiny_pair(MODEL)[1], options, tmp_path / "model")
    with pytest.raises(ArtifactError, match=rf"a CPU with .*{missing}.*, which this one lacks"):
        Model.load(folder)
    done = run(embedded(folder, tmp_path))
    assert done.returncode == NO_SUCH_CPU, done.stderr
    assert b"avx512" in done.stderr
