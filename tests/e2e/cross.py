"""One tiny model as a program for another processor, run there or by an emulator."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from bessemer.artifact.manifest import Manifest
from bessemer.artifact.reader import read_manifest
from bessemer.artifact.text.build import TOKENIZER_FILE
from bessemer.artifact_parts import code_variants, model_objects
from bessemer.backend import link
from bessemer.backend.target import Target
from bessemer.backend.tools import run_tool
from bessemer.codegen.abi import emit_header
from bessemer.compile_options import CompileOptions
from bessemer.compiler import Compilation, build_objects, generate_for
from bessemer.graph import parse_graph
from bessemer.libraries import Libraries
from bessemer.passes.pipeline import Lowered, lower
from bessemer.standalone import RUNNER_FILE, Runner
from bessemer.verify.model import options_of

DRIVER = Path(__file__).with_name("step_driver.c")


@cache
def lowered(folder: Path) -> Lowered:
    """The graphs of a compiled model, from the one that it keeps."""
    return lower(parse_graph((folder / "graph/imported.graph").read_text(encoding="utf-8")))


def compilation(
    folder: Path, target: Target, *, code: Target | None = None, assembly: bool = False
) -> Compilation:
    """The machine code of a compiled model for `target`. code: the target whose kernels are
    lowered to it, by default its own.
    """
    manifest = read_manifest(folder)
    options = options_of(manifest.options)
    options = CompileOptions(
        options.weights,
        options.kv,
        options.context,
        chunk=options.chunk,
        emit=("asm",) if assembly else (),
    )
    (generated,) = generate_for(lowered(folder), options, [code or target], manifest.context_length)
    assert generated.state == manifest.state
    assert tuple(generated.weights) == manifest.weights
    made = Compilation(None, options, target, lowered(folder), generated)  # type: ignore[arg-type]
    build_objects(made)
    return made


def assembly(made: Compilation) -> str:
    return "".join(module.assembly or "" for module in made.objects.values())


@dataclass(frozen=True)
class Program:
    """The driver with a model in it."""

    path: Path
    manifest: Manifest
    weights: Path
    header: Path

    def logits(
        self, ids: Sequence[int], prefill: int, *, threads: int = 2, emulator: Sequence[str] = ()
    ) -> np.ndarray:
        """float32[len(ids), vocab]: a prefill of the first ids, then one decode for each."""
        command = [*emulator, self.path, self.weights, self.header, threads, prefill, *ids]
        done = subprocess.run([str(w) for w in command], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        return np.frombuffer(done.stdout, np.float32).reshape(len(ids), -1)


def program(folder: Path, made: Compilation, out: Path) -> Program:
    """Link the driver with the model and the pool."""
    out.mkdir(parents=True)
    objects = model_objects(made, out)
    objects += link.compile_native(made.target, out / "native")
    header = emit_header(made.generated, "model")
    (out / "model.h").write_text(header, encoding="utf-8")
    manifest = read_manifest(folder)
    words = out / "header.bin"
    words.write_bytes(manifest.state.header().tobytes())
    compiler = [shutil.which("cc") or "cc"] if made.target.is_native else zig_cc(made.target)
    command = [*compiler, "-std=c11", "-O1", f"-I{out}", str(DRIVER), *map(str, objects)]
    run_tool([*command, "-lm", "-lpthread", "-o", str(out / "driver")], env=zig_environment())
    return Program(out / "driver", manifest, folder / "weights.bin", words)


def runner(folder: Path, target: Target, out: Path) -> Path:
    """The standalone program of a compiled model for another processor, beside the same weights."""
    made = compilation(folder, target)
    place, code, description = libraries(folder, made, out)
    Runner(target, False, out / "work").write(code, description, place)
    return place / RUNNER_FILE


def libraries(
    folder: Path, made: Compilation, out: Path, prefix: str = ""
) -> tuple[Path, list[Path], Path]:
    """A folder with the libraries and the header, the weights and the tokenizer; the model's own
    objects, and that of its description.
    """
    manifest = read_manifest(folder)
    work, place = out / "work", out / "model"
    for made_folder in (work, place):
        made_folder.mkdir(parents=True)
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja", ".bin") and file.name != TOKENIZER_FILE:
            (place / file.name).symlink_to(file)
    maker = Libraries(
        made.generated,
        manifest.name,
        made.target,
        code_variants(made),
        work,
        manifest.rope,
        prefix,
    )
    code = model_objects(made, work)
    objects = [*code, *maker.native_objects()]
    return place, code, maker.write(objects, place, manifest.weights_digest)


def zig_cc(target: Target) -> list[str]:
    return [sys.executable, "-m", "ziglang", "cc", "-target", link._zig_triple(target)]


def zig_environment() -> dict[str, str]:
    return dict(link._environment())


def emulator(arch: str, cpu: str) -> list[str]:
    """qemu's user mode for another processor, with a C library of it. Where they are not installed
    the test is skipped.
    """
    name, libraries = f"qemu-{arch}", Path(f"/usr/{arch}-linux-gnu")
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (Debian's package qemu-user)")
    if not (libraries / "lib").is_dir():
        package = {"aarch64": "arm64"}.get(arch, arch)
        pytest.skip(f"{libraries} is not there (Debian's package libc6-{package}-cross)")
    return [name, "-L", str(libraries), "-cpu", cpu]
