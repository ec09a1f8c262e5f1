"""What a block format is: a fixed number of elements stored in a fixed number of bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

F32Array = npt.NDArray[np.float32]
U8Array = npt.NDArray[np.uint8]

DECODE_CHUNK_ELEMENTS = 1 << 18
"""Elements decoded at a time: the temporaries (about 4 MiB) stay in the cache, and decoding a
tensor needs little more memory than its result."""


@dataclass(frozen=True)
class BlockFormat:
    """One storage format.

    Attributes:
        name: lower case, as in manifests: ``"q4_k"``.
        elements: values in a block (1 for plain floats). Rows of a tensor are whole blocks.
        layout: the packed little-endian dtype of one block, with a name for each field.
        decode: blocks ``[n]`` of dtype `layout` to float32 ``[n, elements]``, the same bits as
            ggml's reference dequantisation.
    """

    name: str
    elements: int
    layout: np.dtype
    decode: Callable[[np.ndarray], F32Array]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.layout.itemsize

    @property
    def bits_per_weight(self) -> float:
        """Storage cost of one element, in bits."""
        return 8 * self.block_bytes / self.elements

    def nbytes(self, elements: int) -> int:
        """Bytes that `elements` values take; they must fill whole blocks (ValueError)."""
        if elements % self.elements:
            raise ValueError(f"{elements} values do not fill whole {self.name} blocks")
        return elements // self.elements * self.block_bytes


def decode_blocks(fmt: BlockFormat, data: U8Array, shape: tuple[int, ...]) -> F32Array:
    """Decodes the bytes of a whole tensor to a new float32 array of `shape`.

    Args:
        data: uint8 ``[fmt.nbytes(prod(shape))]``, any alignment.
        shape: the tensor's shape, row-major; its last dimension is a multiple of the block.

    Raises:
        ValueError: the bytes and the shape do not fit together.
    """
    total = int(np.prod(shape, dtype=np.int64))
    if data.nbytes != fmt.nbytes(total):
        raise ValueError(
            f"{data.nbytes} bytes do not hold {total} values of format {fmt.name} "
            f"({fmt.nbytes(total)} bytes)"
        )
    blocks = np.frombuffer(data, dtype=fmt.layout)
    out = np.empty((len(blocks), fmt.elements), dtype=np.float32)
    step = max(1, DECODE_CHUNK_ELEMENTS // fmt.elements)
    # A scale that is NaN or infinite gives NaN weights; whoever uses them reports that.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(blocks), step):
            out[start : start + step] = fmt.decode(blocks[start : start + step])
    return out.reshape(shape)
