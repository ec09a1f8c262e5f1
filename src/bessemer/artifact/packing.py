"""Numbers of a tensor to the bytes of `weights.bin`, and back.

A matrix is packed a few panels at a time, so that the memory needed beside the tensor itself is
small whatever its size; and a large tensor in parts of its rows (`row_parts`), so that it is never
whole in memory either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bessemer.artifact.layout import (
    PANEL_ROWS,
    Q8_BLOCK_BYTES,
    Q8_DEPTH,
    Q8_PAIR,
    Q8_SCALES_AT,
    StoredWeight,
)
from bessemer.errors import CompileError
from bessemer.quantize.floats import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16
from bessemer.quantize.q8_0 import encode

# Numbers packed at a time: the temporaries (about 16 MiB) stay small beside any tensor, and
# a block is large enough that Python's part in it doesn't show.
BLOCK_NUMBERS = 1 << 20

# Numbers of a part of a tensor: 64 MiB of float32, an expert of DeepSeek V4 Flash. Reading parts
# of this size costs no more than reading all at once.
PART_NUMBERS = 1 << 24

# 16-bit floats are held as bit patterns: NumPy has no bfloat16.
ELEMENTS: dict[str, np.dtype] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<u2"),
    "bf16": np.dtype("<u2"),
    "q8_0": np.dtype("u1"),
    "i64": np.dtype("<i8"),
    "i32": np.dtype("<i4"),
    "bool": np.dtype("?"),
}


def row_parts(weight: StoredWeight) -> list[range]:
    """The rows of a weight's leading axis in parts of about PART_NUMBERS, at least a row. Parts of
    a matrix are whole panels.
    """
    if not weight.shape:
        return []
    count, *inner = weight.shape
    step = PANEL_ROWS if weight.layout == "panels" and len(inner) == 1 else 1
    step *= max(1, PART_NUMBERS // max(1, step * math.prod(inner)))
    return [range(i, min(i + step, count)) for i in range(0, count, step)]


def pack(
    values: np.ndarray, weight: StoredWeight, *, stored: bool = False, rows: range | None = None
) -> Iterator[npt.NDArray[np.uint8]]:
    """The bytes of a weight in pieces, in order; together `weight.nbytes`.

    values: the tensor in its logical shape, float32 for the float types; with `stored`, already in
    the storage type (bit patterns for f16 and bf16).  rows: those that `values` has, where it is
    one of `row_parts`; then these rows' bytes.
    Raises CompileError when the shape is another one, or when a finite number doesn't fit f16.
    """
    shape = weight.shape if rows is None else (len(rows), *weight.shape[1:])
    if tuple(values.shape) != shape:
        raise CompileError(
            f"weight {weight.name!r} has shape {list(values.shape)}, and the compiled code expects "
            f"{list(shape)}: this is a bug of Bessemer, please report it with the model"
        )
    if weight.layout == "plain":
        flat = values.reshape(-1)
        for start in range(0, flat.size, BLOCK_NUMBERS):
            yield _bytes(_convert(flat[start : start + BLOCK_NUMBERS], weight, stored))
        return
    *lead, height, depth = shape
    for matrix in values.reshape(math.prod(lead), height, depth):
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
        if weight.dtype == "q8_0":
            yield _bytes(_quantised_panels(block, weight))
            continue
        panels = block.reshape(-1, PANEL_ROWS, depth).transpose(0, 2, 1)
        yield _bytes(np.ascontiguousarray(panels))


def _quantised_panels(block: npt.NDArray[np.float32], weight: StoredWeight) -> np.ndarray:
    """Rows [32 p, K] as q8_0 panels uint8 [p, ceil(K/32), 1088]."""
    rows, depth = block.shape
    missing = -depth % Q8_DEPTH
    if missing:
        block = np.concatenate([block, np.zeros((rows, missing), block.dtype)], axis=1)
    scales, quantised = encode(block.reshape(rows, -1, Q8_DEPTH))
    if not np.isfinite(scales).all():
        raise _beyond_range(weight, float(np.nanmax(np.abs(block))), "--weights bf16 or f32")
    panels, blocks = rows // PANEL_ROWS, quantised.shape[1]
    out = np.empty((panels, blocks, Q8_BLOCK_BYTES), np.uint8)
    pairs = quantised.reshape(panels, PANEL_ROWS, blocks, Q8_DEPTH // Q8_PAIR, Q8_PAIR)
    flat = np.ascontiguousarray(pairs.transpose(0, 2, 3, 1, 4)).view(np.uint8)
    out[..., :Q8_SCALES_AT] = flat.reshape(panels, blocks, -1)
    row_scales = scales.reshape(panels, PANEL_ROWS, blocks).transpose(0, 2, 1)
    out[..., Q8_SCALES_AT:] = np.ascontiguousarray(row_scales).view(np.uint8)
    return out


def _unpack_quantised(data: npt.NDArray[np.uint8], weight: StoredWeight) -> np.ndarray:
    """float32 of q8_0 panels, in the logical shape."""
    *lead, rows, depth = weight.shape
    stored = data.reshape(-1, Q8_BLOCK_BYTES)
    quantised = np.ascontiguousarray(stored[:, :Q8_SCALES_AT]).view(np.int8)
    scales = np.ascontiguousarray(stored[:, Q8_SCALES_AT:]).view(np.float16).astype(np.float32)
    pairs = quantised.reshape(-1, Q8_DEPTH // Q8_PAIR, PANEL_ROWS, Q8_PAIR)
    by_depth = pairs.transpose(0, 1, 3, 2).reshape(-1, Q8_DEPTH, PANEL_ROWS)
    values = by_depth.astype(np.float32) * scales[:, None, :]
    blocks = -(-depth // Q8_DEPTH)
    by_panel = values.reshape(*lead, -1, blocks * Q8_DEPTH, PANEL_ROWS)
    by_row = np.moveaxis(by_panel, -1, -2).reshape(*lead, -1, blocks * Q8_DEPTH)
    return np.ascontiguousarray(by_row[..., :rows, :depth])


def _beyond_range(weight: StoredWeight, largest: float, advice: str) -> CompileError:
    return CompileError(
        f"weight {weight.name!r} holds {largest:g}, which is beyond the range of "
        f"{weight.dtype}: compile with {advice}"
    )


def _bytes(array: np.ndarray) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _convert(block: np.ndarray, weight: StoredWeight, stored: bool) -> np.ndarray:
    """A block in the weight's storage type."""
    element = ELEMENTS[weight.dtype]
    if weight.dtype == "q8_0":
        return block.astype(np.float32, copy=False)  # quantised with the whole panel
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
        raise _beyond_range(weight, largest, advice)
    return bits


def unpack(data: npt.NDArray[np.uint8], weight: StoredWeight) -> np.ndarray:
    """The tensor that `data`, uint8 [weight.nbytes], stores, in its logical shape.

    Float types come as float32, the others as they are. The result never shares memory with `data`
    unless the storage is plain and needs no widening.
    """
    if data.nbytes != weight.nbytes:
        raise ValueError(f"{weight.name}: {data.nbytes} bytes instead of {weight.nbytes}")
    if weight.dtype == "q8_0":
        return _unpack_quantised(data, weight)
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
