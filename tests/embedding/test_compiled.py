"""The C API of compiled models: the numbers are Python's, and it is C and C++ that compile."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bessemer.native import FOLDER, public_functions, public_header
from bessemer.runtime.model import Model
from tests.embedding import models
from tests.embedding.c_api import Api, CModel
from tests.tiny_models import VOCAB


@pytest.mark.parametrize("threads", [1, 2])
def test_numbers_are_those_of_python(threads: int, tmp_path: Path) -> None:
    """Prefill in chunks, decode, a rewind within the rings and one beyond, a copy, a file: to the
    bit.
    """
    folder = models.plain()
    ids = np.random.default_rng(1).integers(0, VOCAB, models.CONTEXT).tolist()
    ours = CModel(Api(folder / "model.so"), folder, threads=threads).session()
    theirs = Model.load(folder, threads=threads).session()
    np.testing.assert_array_equal(ours.prefill(ids[:37]), theirs.prefill(ids[:37]))
    for token in ids[37:70]:
        np.testing.assert_array_equal(ours.decode(token), theirs.decode(token))
    for keep in (66, 3):
        ours.rewind(keep)
        theirs.rewind(keep)
        for token in (5, 6):
            np.testing.assert_array_equal(ours.decode(token), theirs.decode(token))
    want = theirs.prefill(ids[:40], all_logits=True)
    np.testing.assert_array_equal(ours.prefill_rows(ids[:40], 40), want)
    assert ours.tokens == theirs.tokens
    copy = ours.fork()
    theirs.save(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    ours.rewind(0)
    ours.load(tmp_path / "theirs")
    want = theirs.decode(9)
    np.testing.assert_array_equal(ours.decode(9), want)
    np.testing.assert_array_equal(copy.decode(9), want)


@pytest.mark.parametrize("name", ["plain", "first"])
@pytest.mark.parametrize("language", ["c", "c++"])
def test_the_header_alone(name: str, language: str, tmp_path: Path) -> None:
    """It compiles without a warning in old standards of both languages."""
    folder, tag = (models.plain(), "BSM_") if name == "plain" else (models.first(), "FIRST_")
    prefix = "" if name == "plain" else "first_"
    source = tmp_path / "program"
    source.write_text(
        f'#include "model.h"\n#include "model.h"\n'
        f"int main(void) {{ return {prefix}bsm_describe()->vocab_size != {tag}VOCAB; }}\n"
    )
    compiler = shutil.which("gcc" if language == "c" else "g++")
    zig = [sys.executable, "-m", "ziglang", "cc" if language == "c" else "c++"]
    command = [compiler] if compiler else zig
    flags = ["-std=c11" if language == "c" else "-std=c++11", "-Wall", "-Wextra", "-Werror"]
    words = [*command, *flags, "-pedantic", "-fsyntax-only", f"-I{folder}", "-x", language]
    done = subprocess.run([*words, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_prefix_is_on_every_symbol() -> None:
    """Of the archive: whatever it defines for others, hidden or not."""
    from bessemer.backend.tools import require_llvm_tool, run_tool

    listing = run_tool(
        [
            require_llvm_tool("llvm-nm"),
            "--extern-only",
            "--defined-only",
            "--just-symbol-name",
            str(models.first() / "libmodel.a"),
        ]
    )
    names = {line for line in listing.split() if not line.endswith(":")}
    assert {"first_bsm_open", "first_bsm_this_model", "first__mlir_ciface_forward_decode"} <= names
    assert all(name.startswith("first_") for name in names)


def test_the_documentation_names_what_there_is() -> None:
    """Each function and status in docs/embedding.md exists, and none is left out."""
    text = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
    named = set(re.findall(r"\bbsm_\w+", text))
    types = set(re.findall(r"^} (bsm_\w+);|struct \w+ (bsm_\w+);", public_header(), re.MULTILINE))
    known = public_functions() | {name for pair in types for name in pair}
    assert named <= known
    pool = set(re.findall(r"\b(bsm_\w+)\(", (FOLDER / "bessemer.h").read_text()))
    assert public_functions() - pool <= named
    statuses = set(re.findall(r"\b(BSM_(?:ERROR_\w+|OK|CANCELLED)) = ", public_header()))
    assert statuses == set(re.findall(r"^\| `(BSM_\w+)` \|", text, re.MULTILINE))


def test_the_program_in_the_documentation(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()
    code = re.findall(r"```c\n(.*?)```", text, re.DOTALL)[0]
    folder = models.plain()
    code = code.replace('"DIR"', f'"{folder}"').replace("{504, 1463, 282}", "{5, 17, 33}")
    (tmp_path / "program.c").write_text(code)
    compiler = shutil.which("cc") or shutil.which("gcc")
    command = [compiler] if compiler else [sys.executable, "-m", "ziglang", "cc"]
    words = ["-O2", f"-I{folder}", str(tmp_path / "program.c"), str(folder / "libmodel.a")]
    program = str(tmp_path / "program")
    subprocess.run([*command, *words, "-lm", "-lpthread", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True)
    session = Model.load(folder).session()
    logits, want = session.prefill([5, 17, 33]), []
    for _ in range(20):
        want.append(int(logits.argmax()))
        logits = session.decode(want[-1])
    assert [int(w) for w in done.stdout.split()] == want
