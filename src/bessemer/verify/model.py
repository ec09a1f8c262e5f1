"""The source of an artifact: finding it again, and what compiling it again gives."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.artifact.manifest import Manifest
from bessemer.errors import BessemerError

if TYPE_CHECKING:
    from bessemer.compile_options import CompileOptions
    from bessemer.compiler import Compilation


@dataclass(frozen=True)
class Origin:
    """Where the source of an artifact is, or why it can't be had (then `source` is None)."""

    source: Any
    reason: str = ""


def find_source(manifest: Manifest, given: Any) -> Origin:
    """The checkpoint or module to compare with: the given one, or that of the manifest."""
    if given is not None:
        return Origin(given)
    path = str(manifest.source.get("path", ""))
    kind = manifest.source.get("kind", "")
    if not path:
        what = "a module in memory" if kind == "module" else "a source that is not recorded"
        return Origin(None, f"it was compiled from {what}; pass it as checkpoint")
    if not os.path.exists(path):
        return Origin(None, f"its checkpoint is no longer at {path}; pass it with --checkpoint")
    return Origin(Path(path))


def options_of(recorded: Mapping[str, Any]) -> CompileOptions:
    """The options that a manifest records; those that this version doesn't know are left out."""
    from bessemer.compile_options import CompileOptions

    known = {f.name for f in fields(CompileOptions)}
    kept: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in recorded.items() if k in known
    }
    return CompileOptions(**kept)


def compile_again(source: Any, manifest: Manifest) -> Compilation:
    """Import, passes and code generation of the source with the artifact's options.

    Raises BessemerError when the source can't be compiled, or this version of the compiler has
    other options.
    """
    from bessemer.compiler import generate_model

    try:
        options = options_of(manifest.options)
    except (TypeError, ValueError) as error:
        raise BessemerError(f"the recorded options can't be used: {error}") from None
    return generate_model(source, options)
