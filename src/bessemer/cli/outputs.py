"""Files that a user names to be written. None of them may be one that the same call reads: a model,
a prompt or a table of directions would be gone, and a mapped file that shrinks kills the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.arguments import checked_model, checked_path
from bessemer.errors import BessemerError, UsageError

if TYPE_CHECKING:
    from bessemer.cli.options import SteeringArguments
    from bessemer.runtime.model import Model

# What is read, by the words of a message. A number is an open file.
Inputs = Mapping[str, Path | int]

STDIN = 0
# Of a checkpoint's folder: what a model is made of, and no log that somebody keeps beside it.
MODEL_SUFFIXES = (".safetensors", ".gguf", ".json", ".model", ".jinja")


def check_output(option: str, path: Path, inputs: Inputs) -> None:
    """Raise UsageError when `path` is one of the inputs, or lies in a folder that is one."""
    if path.exists() and not path.is_file():
        return  # a pipe or a terminal; a folder can't be written anyway
    for what, source in inputs.items():
        if isinstance(source, Path) and source.is_dir():
            inside = path.resolve().is_relative_to(source.resolve())
            if inside or any(_same(path, file) for file in _files(source)):
                raise UsageError(f"{option} {path}: it lies in {what}; name a file elsewhere")
        elif _same(path, source):
            raise UsageError(
                f"{option} {path}: it is {what}, and would be overwritten; name another file"
            )


def model_inputs(name: str, steering: SteeringArguments | None = None) -> dict[str, Path | int]:
    """What is read for a model, as far as it can be said before it is found: nothing is fetched or
    read for this.
    """
    from bessemer.artifact import cache

    path = checked_model(name)
    if not path.exists():
        from bessemer.importer.checkpoint import ALIASES, resolve

        if name in ALIASES:
            with contextlib.suppress(BessemerError):  # loading it will say so
                path = resolve(name)
    inputs: dict[str, Path | int] = {"the cache of compiled models": cache.cache_root()}
    if steering is not None and steering.steering is not None:
        inputs["the file of directions"] = checked_path("--steering", steering.steering)
    return inputs | _checkpoint(path)


def loaded_inputs(model: Model) -> dict[str, Path | int]:
    """The folder of a loaded model, and what it was compiled from as far as it is there."""
    inputs: dict[str, Path | int] = {"the compiled model's folder": model.path}
    source = str(model.manifest.source.get("path", ""))
    if not source:
        return inputs
    path = Path(source)
    if not path.is_dir():
        return inputs | _checkpoint(path)
    files = (file for file in _files(path) if file.suffix in MODEL_SUFFIXES)
    return inputs | {f"{file.name} of the model": file for file in files}


def _checkpoint(path: Path) -> dict[str, Path | int]:
    if path.is_dir():
        return {"the model's folder": path}
    # With the other parts of a split file.
    beside = (file for file in _files(path.parent) if file.suffix == ".gguf")
    parts = {f"{file.name} beside the model": file for file in beside}
    return {"the model": path, **parts} if path.is_file() else {}


def _files(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (path for path in sorted(folder.iterdir()) if path.is_file())


def _same(path: Path, source: Path | int) -> bool:
    """Whether both are the same file now, or would be."""
    with contextlib.suppress(OSError):
        return os.path.samestat(path.stat(), os.stat(source))
    return False
