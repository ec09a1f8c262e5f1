"""The toy of tests/runtime as a library with the C API."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from bessemer.artifact.manifest import RopeSwitch
from bessemer.backend.link import compile_c
from bessemer.backend.target import Target
from bessemer.codegen.description import Variant
from bessemer.libraries import Libraries
from tests.runtime.toy import NO_THRESHOLD, SOURCE, VOCAB, toy_flags, toy_generated, write_toy


def new_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="bessemer-toy-c-"))


@functools.cache
def native_objects() -> list[Path]:
    """The thread pool and the C API, compiled once."""
    generated: Any = toy_generated()
    return Libraries(generated, "toy", Target.native(), [], new_folder()).native_objects()


@functools.cache
def toy_object(threshold: int = NO_THRESHOLD) -> Path:
    path = new_folder() / "toy.o"
    compile_c(SOURCE, path, Target.native(), toy_flags(VOCAB, threshold))
    return path


def write_c_toy(
    folder: Path,
    *,
    rope: RopeSwitch | None = None,
    variants: tuple[Variant, ...] = (Variant(()),),
    prefix: str = "",
    bias: Any = None,
    name: str = "toy",
    **shape: Any,
) -> Path:
    """An artifact of the toy whose libraries have the C API. shape: of `toy_generated`."""
    generated: Any = toy_generated(**shape)
    libraries = Libraries(generated, name, Target.native(), variants, new_folder(), rope, prefix)
    objects = [toy_object(rope.threshold if rope else NO_THRESHOLD), *native_objects()]
    return write_toy(
        folder,
        rope=rope,
        prefix=prefix,
        bias=bias,
        write_code=lambda to, digest: libraries.write(objects, to, digest),
        **shape,
    )
