"""What compiling needs beyond what running does, and what to say where it is absent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bessemer.errors import CompileError

# Imported when a model is compiled; an installation that only runs models is without them.
COMPILING_MODULES = frozenset(
    {"gguf", "huggingface_hub", "llvmlite", "mlir", "safetensors", "torch", "transformers"}
)


def what_to_install(error: ModuleNotFoundError) -> str | None:
    """What to do when a module that compiling needs is absent; None when it is another one."""
    if (error.name or "").partition(".")[0] not in COMPILING_MODULES:
        return None
    return f"{error.name} is not installed; to compile models: pip install 'bessemer[compile]'"


@contextlib.contextmanager
def compiling_modules() -> Iterator[None]:
    """A module that compiling needs and that is absent is a CompileError that says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = what_to_install(error)
        if message is None:
            raise
        raise CompileError(message) from error
