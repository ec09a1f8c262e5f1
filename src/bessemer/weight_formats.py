"""The formats that a model's matrices can be stored in: their names, and the one taken unasked."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

WEIGHT_FORMATS = ("f32", "f16", "bf16", "q8_0")
# What others call weights of 8 bits, by what their engines multiply them with: activations in
# floats, in floats of 16 bits, or in integers of 8 bits a block. Here they all are q8_0, whose
# activations are integers of 16 bits a block (`codegen.kernels.integer_rows`).
ALIASES = {"w8a32": "q8_0", "w8a16": "q8_0", "w8a8": "q8_0"}
# Of a checkpoint in floats, and of one whose matrices are quantised.
DEFAULT_FORMAT = "f16"
DEFAULT_QUANTISED = "q8_0"


class StoredTensor(Protocol):
    """See `importer.checkpoint.TensorInfo`."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


class Tensors(Protocol):
    """What is asked of a checkpoint."""

    def names(self) -> list[str]: ...
    def info(self, name: str) -> StoredTensor: ...


def canonical_format(name: str) -> str:
    """The format that a name stands for; any other text as it is."""
    return ALIASES.get(name, name)


@dataclass(frozen=True)
class DefaultFormat:
    """The format of a checkpoint's weights where none is asked for.

    quantised: the block formats of its matrices, the commonest first, where these decided.
    """

    name: str
    quantised: tuple[str, ...] = ()

    @staticmethod
    def of(checkpoint: Tensors) -> DefaultFormat:
        """q8_0 where most numbers of the matrices are quantised already."""
        from bessemer.quantize import FLOAT_FORMATS, FORMATS  # with numpy, which no help needs

        held: Counter[str] = Counter()
        for name in checkpoint.names():
            info = checkpoint.info(name)
            if len(info.shape) >= 2:
                held[info.dtype] += math.prod(info.shape)
        blocks = [f for f, _ in held.most_common() if f in FORMATS and f not in FLOAT_FORMATS]
        if 2 * sum(held[f] for f in blocks) <= held.total():
            return DefaultFormat(DEFAULT_FORMAT)
        return DefaultFormat(DEFAULT_QUANTISED, tuple(blocks))
