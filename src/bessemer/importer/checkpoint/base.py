"""What every checkpoint offers, whatever it is stored as."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.errors import CheckpointError
from bessemer.importer.checkpoint.files import content_hash, damaged

MISSING_TENSORS_SHOWN = 12
"""Names listed in an error about missing tensors; the rest is counted."""


def some_names(names: Sequence[str], most: int) -> str:
    """The first of many names, and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as it is stored.

    Attributes:
        name: transformers' parameter name.
        shape: as transformers has it; a linear weight is ``(out, in)``.
        dtype: a format name of `bessemer.quantize` (``"f32"``, ``"f16"``, ``"q4_k"``), or the
            lower-case safetensors dtype (``"i64"``) of a tensor that is not a weight.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint(ABC):
    """An opened checkpoint. A context manager; `close` unmaps its files.

    Attributes:
        path: the folder or file.
        kind: ``"hf"`` or ``"gguf"``.
        config: what config.json holds, or would hold for a GGUF.
        generation_config: likewise generation_config.json; empty if there is none.
    """

    path: Path
    kind: str
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @property
    def config_file(self) -> Path:
        """The file that `config` was read from, for messages."""
        return self.path / "config.json" if self.path.is_dir() else self.path

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names, sorted. A tied ``lm_head.weight`` that is not stored is not listed."""

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Shape and storage format of a tensor. CheckpointError if there is none of that name."""

    @abstractmethod
    def read(self, name: str, rows: range | None = None) -> npt.NDArray[np.float32]:
        """A tensor as a new float32 array of `TensorInfo.shape`; nothing of it is kept here.

        rows: of the leading axis, in steps of one; only these are read.
        """

    @abstractmethod
    def read_stored(self, name: str, rows: range | None = None) -> npt.NDArray[Any]:
        """A tensor (or rows of it) in its storage type, as a new array of `TensorInfo.shape`.

        float32 for f32, uint16 bit patterns for f16 and bf16; a quantised tensor is decoded as
        by `read`.
        """

    @property
    @abstractmethod
    def is_quantised(self) -> bool:
        """Whether any tensor is stored in a quantised block format."""

    @abstractmethod
    def has_tokenizer(self) -> bool:
        """Whether `write_tokenizer` has anything to write."""

    @abstractmethod
    def write_tokenizer(self, folder: Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json,
        generation_config.json and, if there is one, chat_template.jinja into `folder`.

        Raises:
            CheckpointError: there is no tokenizer, or one that can't be converted.
        """

    @abstractmethod
    def content_files(self) -> list[tuple[str, Path]]:
        """The files that make up this checkpoint, each with a label that does not depend on where
        it lies."""

    @abstractmethod
    def close(self) -> None:
        """Closes the files; tensors can't be read any more. Safe to call twice."""

    def require(self, names: Iterable[str]) -> None:
        """Checks that all `names` are present.

        Raises:
            CheckpointError: lists the tensors that are not, with the files looked at.
        """
        held = set(self.names())
        absent = [name for name in names if name not in held]
        if not absent:
            return
        raise CheckpointError(
            f"{self.path}: {len(absent)} tensor(s) missing: "
            f"{some_names(absent, MISSING_TENSORS_SHOWN)}. "
            f"Looked in {self._weight_files_text()}. The checkpoint is incomplete, or belongs to "
            "another configuration; download it again."
        )

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """The files that hold tensors."""

    def _weight_files_text(self) -> str:
        files = [path.name for path in self.weight_files()]
        return ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")

    def _no_such_tensor(self, name: str) -> CheckpointError:
        return damaged(self.path, f"not in the checkpoint ({self._weight_files_text()})", name)

    def fingerprint(self) -> str:
        """A key for the content (SHA-256, hexadecimal): any changed byte of any file changes it,
        moving or renaming the checkpoint does not."""
        digest = hashlib.sha256(b"bessemer checkpoint 1\n")
        for label, path in sorted(self.content_files()):
            digest.update(f"{label}\0{content_hash(path)}\n".encode())
        return digest.hexdigest()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
