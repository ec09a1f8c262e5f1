"""Bessemer: an ahead-of-time compiler and runtime for language models on CPUs.

    import bessemer

    model = bessemer.compile("path-or-name", weights="f16", context=4096, output="dir")
    model = bessemer.load("dir")
    model.generate("Once upon a time", max_tokens=64)
    model.chat([{"role": "user", "content": "What is the capital of France?"}])
    session = model.session()
    logits = session.prefill(ids)

Importing this loads neither torch nor MLIR; `compile` does, when it has something to compile.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as typing has it, whose import takes longer than all of this
if TYPE_CHECKING:
    from typing import Any

    from bessemer.api import compile, load
    from bessemer.compile_options import CompileOptions
    from bessemer.errors import (
        ArtifactError,
        BessemerError,
        CheckpointError,
        CompileError,
        ContextLengthError,
        GenerationError,
        UnsupportedError,
        UsageError,
    )
    from bessemer.runtime.conversation import Conversation
    from bessemer.runtime.model import Model
    from bessemer.runtime.sampling import SamplingOptions
    from bessemer.runtime.session import Session

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "BessemerError",
    "CheckpointError",
    "CompileError",
    "CompileOptions",
    "ContextLengthError",
    "Conversation",
    "GenerationError",
    "Model",
    "SamplingOptions",
    "Session",
    "UnsupportedError",
    "UsageError",
    "compile",
    "load",
]

_HOMES = {
    "compile": "api",
    "load": "api",
    "CompileOptions": "compiler",
    "Conversation": "runtime.conversation",
    "Model": "runtime.model",
    "SamplingOptions": "runtime.sampling",
    "Session": "runtime.session",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'bessemer' has no attribute {name!r}")
    import importlib

    home = importlib.import_module(f"bessemer.{_HOMES.get(name, 'errors')}")
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
