"""Whether a disk has room for an artifact, told before the work that would be lost otherwise."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bessemer.artifact.layout import PANEL_ROWS, Q8_BLOCK_BYTES, Q8_DEPTH, STORAGE_BYTES
from bessemer.errors import ArtifactError
from bessemer.quantize import FORMATS
from bessemer.weight_formats import Tensors

# A tensor of one of a model's layers, as transformers, GPT-NeoX and DeepSeek name it. What lies
# elsewhere (prediction of further tokens, images) need not become part of the compiled model.
_LAYER = re.compile(r"(?:(?:model|gpt_neox|transformer)\.)?(?:layers|h)\.(\d+)\.")

# What a runner has beside the model's code: its own, the C library where it is static, and tables.
RUNNER_BYTES = 2 << 20


def check_space(destination: Path, needed: int, advice: str = "") -> None:
    """Raise ArtifactError when the disk of `destination` can't hold `needed` bytes more.

    advice: what else can be done about it than to make room or to go elsewhere.
    """
    parent = destination.absolute()
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        free = shutil.disk_usage(parent).free
    except OSError:
        return
    if free < needed:
        raise ArtifactError(
            f"{destination} needs {_size(needed)} and {parent} has {_size(free)} free: make room "
            f"for {_size(needed - free)} there, or choose another output folder (-o; for the cache "
            f"set XDG_CACHE_HOME){advice}"
        )


def code_bytes(objects: Iterable[Path], tokenizer: Path | None = None) -> int:
    """Bytes that libraries of these objects take at the most, all being in both of them, and what
    is made beside them of constants.

    tokenizer: the file of the tokenizer that a runner gets, which holds the objects once more and
    tables of the tokenizer that are no larger than its text.
    """
    held = sum(each.stat().st_size for each in objects)
    if tokenizer is None:
        return 2 * held
    text = tokenizer.stat().st_size if tokenizer.exists() else 0
    return 3 * held + text + RUNNER_BYTES


def least_weight_bytes(tensors: Tensors, config: Mapping[str, Any], weights: str) -> int:
    """Bytes that a checkpoint's weights take at the least when matrices are stored as `weights`.

    config: as its config.json holds it.  Only what the compiled model surely has is counted: the
    matrices of its layers and one of its vocabulary. Padding, norms and a second matrix of the
    vocabulary come on top; which there are is known after the import.
    """
    text = config.get("text_config")
    stated = text if isinstance(text, Mapping) else config
    layers = stated.get("num_hidden_layers")
    vocabulary = (stated.get("vocab_size"), stated.get("hidden_size"))
    numbers = of_vocabulary = 0
    for name in tensors.names():
        info = tensors.info(name)
        if len(info.shape) not in (2, 3) or info.dtype not in FORMATS:
            continue
        found = _LAYER.match(name)
        if found and isinstance(layers, int) and int(found[1]) < layers:
            numbers += math.prod(info.shape)
        elif info.shape == vocabulary:
            of_vocabulary = math.prod(info.shape)
    return int((numbers + of_vocabulary) * _bytes_of_number(weights))


def _bytes_of_number(weights: str) -> float:
    if weights == "q8_0":
        return Q8_BLOCK_BYTES / (Q8_DEPTH * PANEL_ROWS)
    return STORAGE_BYTES[weights]


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"
