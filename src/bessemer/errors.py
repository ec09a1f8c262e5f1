"""The errors that a user may see. Each message says what is wrong, where, and what to do."""

from __future__ import annotations


class BessemerError(Exception):
    """Base of every error that is reported to the user without a traceback."""


class UsageError(BessemerError):
    """The call itself is wrong (CLI exit code 2)."""


class ArgumentError(UsageError):
    """An argument has a value that it can't have."""

    def __init__(self, name: str, value: str, allowed: str) -> None:
        """name: as Python code gives it.  value: as it is shown.  allowed: what it must be."""
        super().__init__(f"{name} is {value}; it must be {allowed}")
        self.name, self.value, self.allowed = name, value, allowed


class CheckpointError(BessemerError):
    """A checkpoint is missing, damaged, or of an unknown kind."""


class UnsupportedError(BessemerError):
    """A model uses something that Bessemer can't compile; lists all of it at once."""


class CompileError(BessemerError):
    """Compilation failed after the graph was built (a pass, MLIR, LLVM or the linker)."""


class TargetError(CompileError, UsageError):
    """A target or CPU that the user named and that does not exist or does not fit."""


class ArtifactError(BessemerError):
    """A compiled artifact is missing, damaged, or does not fit this machine."""


class ContextLengthError(BessemerError):
    """A prompt or a step does not fit the context; names both numbers."""


class GenerationError(BessemerError):
    """Generation can't go on (NaN logits, nothing left to sample, bad sampling options)."""
