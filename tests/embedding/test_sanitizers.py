"""The native code under AddressSanitizer and UndefinedBehaviorSanitizer, driven at random."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bessemer.artifact.manifest import ARCHIVE_FILE, WEIGHTS_FILE
from bessemer.artifact.reader import read_manifest
from bessemer.artifact.weight_file import data_end
from bessemer.backend.tools import require_llvm_tool, run_tool
from bessemer.native import FOLDER
from tests.embedding import models
from tests.embedding.toys import write_c_toy
from tests.runtime.toy import SOURCE, toy_flags

DRIVER = Path(__file__).with_name("drive.c")
ADDRESS = "-fsanitize=address"
UNDEFINED = ("-fsanitize=undefined", "-fno-sanitize-recover=all")
ROUNDS = 60


def compilers() -> list[tuple[list[str], list[str]]]:
    """Commands and the sanitizers that they may have, the best first."""
    found = [shutil.which(name) for name in ("gcc", "clang", "cc")]
    every = [([path], [ADDRESS, *UNDEFINED]) for path in found if path]
    # zig has no runtime of AddressSanitizer.
    return [*every, ([sys.executable, "-m", "ziglang", "cc"], list(UNDEFINED))]


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[Path]]:
    """A linking command, and the native code and the driver compiled for it."""
    folder = tmp_path_factory.mktemp("sanitized")
    trial = folder / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    for command, sanitizers in compilers():
        flags = ["-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", *sanitizers]
        done = subprocess.run(
            [*command, *flags, str(trial), "-o", str(folder / "trial")], capture_output=True
        )
        if done.returncode == 0 and subprocess.run([str(folder / "trial")]).returncode == 0:
            break
    else:
        pytest.skip("no C compiler here has the runtime of a sanitizer")
    sources = [*sorted(FOLDER.glob("*.c")), DRIVER, SOURCE]

    def build(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        extra = [*toy_flags(), "-Wno-unknown-pragmas"] if source == SOURCE else [f"-I{FOLDER}"]
        run_tool([*command, *flags, *extra, "-c", str(source), "-o", str(out)])
        return out

    with ThreadPoolExecutor(2) as pool:
        return [*command, *sanitizers], list(pool.map(build, sources))


def drive(
    sanitized: tuple[list[str], list[Path]],
    model: Path,
    tmp_path: Path,
    *,
    toy: bool,
    rows: bool = True,
) -> None:
    """Link the model's own objects with the sanitized native code, and run the driver."""
    linker, objects = sanitized
    run_tool(
        [require_llvm_tool("llvm-ar"), "x", "--output", str(tmp_path), str(model / ARCHIVE_FILE)]
    )
    native = {path.name for path in objects}
    own = [path for path in sorted(tmp_path.glob("*.o")) if path.name not in native]
    linked = [path for path in objects if toy or path.stem != SOURCE.stem]
    if toy:
        own = [path for path in own if path.name == "description.o"]
    program = tmp_path / "drive"
    words = [*linker, *map(str, [*linked, *own]), "-lm", "-lpthread", "-o", str(program)]
    run_tool(words)
    table = data_end(read_manifest(model).weights)
    arguments = [
        model / WEIGHTS_FILE,
        table,
        tmp_path / "spoilt.bin",
        11,
        ROUNDS,
        int(toy),
        int(rows),
    ]
    done = subprocess.run(
        [str(program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"},
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr[-4000:]


@pytest.mark.parametrize("named", [False, True])
def test_toy(sanitized: tuple[list[str], list[Path]], tmp_path: Path, named: bool) -> None:
    """All of it, the model included, is sanitized. The toy's mutated buffer counts all tokens of a
    call, so that rows within one can't be compared.
    """
    model = write_c_toy(tmp_path / "toy", named=named)
    drive(sanitized, model, tmp_path, toy=True, rows=not named)


def test_compiled_model(sanitized: tuple[list[str], list[Path]], tmp_path: Path) -> None:
    drive(sanitized, models.plain(), tmp_path, toy=False)
