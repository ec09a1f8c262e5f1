"""The C, C++ and Rust programs in examples/, built and run with tiny compiled models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bessemer.runtime.model import Model
from bessemer.runtime.sampling import Sampler, SamplingOptions
from tests.embedding import models

FOLDER = Path(__file__).parents[2] / "examples"
PROMPT = [5, 17, 33, 4]


def run(*words: str | Path, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(w) for w in words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **env},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def need(tool: str) -> str:
    path = shutil.which(tool)
    if path is None:
        pytest.skip(f"{tool} is not installed")
    return path


def answered(folder: Path, count: int, sampling: SamplingOptions | None = None) -> list[int]:
    """What Python continues the prompt with."""
    session = Model.load(folder, threads=1).session()
    sampler = Sampler(sampling or SamplingOptions(), session.vocab_size)
    logits, ids = session.prefill(PROMPT), []
    for _ in range(count):
        ids.append(sampler.sample(logits, [*PROMPT, *ids]))
        logits = session.decode(ids[-1])
    return ids


def test_c(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    command = [compiler] if compiler else [sys.executable, "-m", "ziglang", "cc"]
    folder, program = models.plain(), tmp_path / "generate"
    source = FOLDER / "c" / "generate.c"
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{folder}"]
    run(*command, *flags, source, folder / "libmodel.a", "-lm", "-lpthread", "-o", program)
    done = run(program, folder, "12", *map(str, PROMPT))
    assert [int(w) for w in done.stdout.split()] == answered(folder, 12)
    assert "4 tokens in" in done.stderr
    run(program, code=2)
    done = run(program, folder, "1", "12345", code=1)
    assert done.stderr.startswith("wrong argument: token id 12345 is none of this model")
    done = run(program, tmp_path, "1", "1", code=1)
    assert "weights.bin can't be read" in done.stderr


def test_cpp_two_models(tmp_path: Path) -> None:
    cmake = need("cmake")
    first, second = models.first(), models.second()
    run(cmake, "-S", FOLDER / "cpp", "-B", tmp_path, f"-DMODELS={models.models_folder()}")
    run(cmake, "--build", tmp_path)
    program = tmp_path / "two_models"
    done = run(program, first, second, *map(str, PROMPT))
    lines = [[int(w) for w in line.split()] for line in done.stdout.splitlines()]
    assert lines == [answered(first, 8), answered(second, 8)]
    done = run(program, second, first, *map(str, PROMPT), code=1)
    assert "belongs to another model" in done.stderr


def test_rust(tmp_path: Path) -> None:
    cargo = need("cargo")
    need("rustc")
    folder = models.plain()
    manifest = FOLDER / "rust" / "Cargo.toml"
    out = {"MODEL": str(folder), "CARGO_TARGET_DIR": str(tmp_path / "target")}
    run(cargo, "build", "--offline", "--locked", "--quiet", "--manifest-path", manifest, **out)
    program = tmp_path / "target" / "debug" / "generate"
    sampling = SamplingOptions(temperature=0.8, seed=42)
    done = run(program, folder, "42", *map(str, PROMPT))
    assert [int(w) for w in done.stdout.split()] == answered(folder, 8, sampling)
    done = run(program, tmp_path, "42", "1", code=1)
    assert "weights.bin can't be read" in done.stderr
