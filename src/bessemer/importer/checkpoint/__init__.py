"""Reading checkpoints: Hugging Face folders and GGUF files behind one interface.

`open_checkpoint` takes what a user writes for MODEL (a folder, a ``.gguf`` file, a hub name, the
alias ``smollm2``) and returns a `Checkpoint`: configuration, tensor names as transformers calls
them, tensors read one at a time, a content key, and the tokenizer's files. Nothing here imports
torch; every file is checked before it is mapped.
"""

from __future__ import annotations

from pathlib import Path

from bessemer.importer.checkpoint.base import Checkpoint, TensorInfo
from bessemer.importer.checkpoint.locate import ALIASES, resolve


def open_checkpoint(name: str | Path) -> Checkpoint:
    """Opens and validates the checkpoint that `name` stands for.

    Args:
        name: a Hugging Face folder, a ``.gguf`` file, a hub name, or an alias; see `resolve`.

    Raises:
        CheckpointError: it can't be found, is damaged, or is of a kind that can't be read; the
            message names the file and, where there is one, the tensor.
    """
    path = resolve(name)
    if path.is_dir():
        from bessemer.importer.checkpoint.huggingface import HuggingFaceCheckpoint

        return HuggingFaceCheckpoint(path)
    from bessemer.importer.checkpoint.gguf_checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


__all__ = ["ALIASES", "Checkpoint", "TensorInfo", "open_checkpoint", "resolve"]
