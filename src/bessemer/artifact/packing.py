"""Numbers of a tensor to the bytes of `weights.bin`, and back.

A matrix is packed a few panels at a time, so that the memory needed beside the tensor itself is
small whatever its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bessemer.artifact.layout import PANEL_ROWS, StoredWeight
from bessemer.errors import CompileError
from bessemer.quantize.floats import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16

# Numbers packed at a time: the temporaries (about 16 MiB) stay small beside any tensor, and
# a block is large enough that Python's part in it doesn't show.
BLOCK_NUMBERS = 1 << 20

# 16-bit floats are held as bit patterns: NumPy has no bfloat16.
ELEMENTS: dict[str, np.dtype] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<u2"),
    "bf16": np.dtype("<u2"),
    "i64": np.dtype("<i8"),
    "i32": np.dtype("<i4"),
    "bool": np.dtype("?"),
}


def pack(
    values: np.ndarray, weight: StoredWeight, *, stored: bool = False
) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of a weight in pieces, in order; together `weight.nbytes`.

    values: the tensor in its logical shape, float32 for the float types; with `stored`, already in
    the storage type (bit patterns for f16 and bf16).
    Raises CompileError when the shape is another one, or when a finite number doesn't fit f16.
    """
    if tuple(values.shape) != weight.shape:
        raise CompileError(
            f"weight {weight.name!r} has shape {list(values.shape)}, and the compiled code expects "
            f"{list(weight.shape)}: this is a bug of Bessemer, please report it with the model"
        )
    if weight.layout == "plain":
        flat = values.reshape(-1)
        for start in range(0, flat.size, BLOCK_NUMBERS):
            yield _bytes(_convert(flat[start : start + BLOCK_NUMBERS], weight, stored))
        return
    *lead, rows, depth = weight.shape
    for matrix in values.reshape(math.prod(lead), rows, depth):
        yield from _pack_panels(matrix, weight, stored)


def _pack_panels(
    matrix: np.ndarray, weight: StoredWeight, stored: bool
) -> Iterator[npt.NDArray[np.uint8]]:
    """[N, K] as [ceil(N/32)][K][32], the missing rows zero."""
    rows, depth = matrix.shape
    step = PANEL_ROWS * max(1, BLOCK_NUMBERS // max(1, PANEL_ROWS * depth))
    for start in range(0, rows, step):
        block = _convert(matrix[start : start + step], weight, stored)
        missing = -len(block) % PANEL_ROWS
        if missing:
            block = np.concatenate([block, np.zeros((missing, depth), block.dtype)])
        panels = block.reshape(-1, PANEL_ROWS, depth).transpose(0, 2, 1)
        yield _bytes(np.ascontiguousarray(panels))


def _bytes(array: np.ndarray) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _convert(block: np.ndarray, weight: StoredWeight, stored: bool) -> np.ndarray:
    """A block in the weight's storage type."""
    element = ELEMENTS[weight.dtype]
    if stored or weight.dtype not in ("f16", "bf16"):
        return block.astype(element, copy=False)
    if weight.dtype == "bf16":
        bits = f32_to_bf16(block)
        exponent = np.uint16(0x7F80)
    else:
        bits = f32_to_f16(block)
        exponent = np.uint16(0x7C00)
    lost = (bits & np.uint16(0x7FFF)) == exponent
    if lost.any() and np.isfinite(block[lost]).any():
        largest = float(np.max(np.abs(block[lost & np.isfinite(block)])))
        advice = "--weights bf16 or --weights f32" if weight.dtype == "f16" else "--weights f32"
        raise CompileError(
            f"weight {weight.name!r} holds {largest:g}, which is beyond the range of "
            f"{weight.dtype}: compile with {advice}"
        )
    return bits


def unpack(data: npt.NDArray[np.uint8], weight: StoredWeight) -> np.ndarray:
    """The tensor that `data`, uint8 [weight.nbytes], stores, in its logical shape.

    Float types come as float32, the others as they are. The result never shares memory with `data`
    unless the storage is plain and needs no widening.
    """
    if data.nbytes != weight.nbytes:
        raise ValueError(f"{weight.name}: {data.nbytes} bytes instead of {weight.nbytes}")
    values = data.view(ELEMENTS[weight.dtype]).reshape(weight.stored_shape)
    if weight.dtype == "f16":
        values = f16_to_f32(values)
    elif weight.dtype == "bf16":
        values = bf16_to_f32(values)
    if weight.layout == "plain":
        return values
    *lead, rows, depth = weight.shape
    by_row = np.moveaxis(values, -1, -2).reshape(*lead, -1, depth)
    return np.ascontiguousarray(by_row[..., :rows, :])
