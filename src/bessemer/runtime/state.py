"""The state memory of a session: which parts of it a number of tokens fills, and what a rewind
leaves usable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bessemer.artifact.layout import (
    HEADER_WORDS,
    KEY_BLOCK,
    LAYER_WORDS,
    STORAGE_BYTES,
    CompressedStream,
    KVLayer,
    SharedLayer,
    StateLayout,
)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Held:
    """What a session holds. Replaced as a whole, so that an interrupt finds it before or after.

    position: tokens of the history.
    valid: how many of them, from the start, the state memory stands for.
    high_water: one past the highest position that may have been written since the state was last
        begun anew; rings have lost what lies more than their length below it.
    regime: of the rotary factors that the state was computed with.
    """

    position: int = 0
    valid: int = 0
    high_water: int = 0
    regime: int = 0


def usable(layout: StateLayout, held: Held, count: int, regime: int) -> int:
    """How many of the first `count` tokens need not be fed again: all that are valid, or 0.

    regime: of the rotary factors that are wanted now.
    """
    keep = min(held.valid, count)
    if held.regime != regime or not keep:
        return 0
    if keep == held.high_water:
        return keep  # nothing was written beyond it
    if layout.mutates:
        return 0
    windows: tuple[KVLayer | SharedLayer, ...] = (*layout.layers, *layout.shared)
    for layer in windows:
        if not layer.window:
            continue  # full attention never loses a row
        if held.high_water - layout.ring_rows(layer) > max(0, keep - layer.window + 1):
            return 0
    for stream in layout.streams:
        needed = stream.first_needed(keep)
        if needed < keep and held.high_water - layout.pending_rows(stream) > needed:
            return 0
    return keep


def filled(layout: StateLayout, memory: Bytes, high_water: int) -> Iterator[Bytes]:
    """Views of everything that writing the positions below `high_water` can have touched.

    The same sequence of shapes for the same arguments: zipping those of two sessions copies one
    into the other, writing them one behind the other saves a session.
    """
    words = memory[: 8 * layout.header_words].view(np.int64)
    base = layout.header_bytes
    for index, entry in enumerate(layout.entries):
        at = HEADER_WORDS + LAYER_WORDS * index
        first, second, rows, more = (int(w) for w in words[at : at + LAYER_WORDS])
        parts = (memory[base + first :], memory[base + second :])
        if isinstance(entry, KVLayer):
            yield from _filled_layer(layout, entry, parts, min(rows, high_water))
        elif isinstance(entry, SharedLayer):
            yield parts[0][: min(rows, high_water) * entry.width * STORAGE_BYTES[layout.kv_dtype]]
        else:
            pending = min(rows, high_water)
            written = min(more, high_water // entry.rate)
            yield from _filled_stream(layout, entry, parts, pending, written)
    yield from named_states(layout, memory)


def _filled_layer(
    layout: StateLayout, layer: KVLayer, parts: tuple[Bytes, Bytes], count: int
) -> Iterator[Bytes]:
    """The first `count` rows of a layer's keys, in whole blocks, and of its values."""
    size, rows = STORAGE_BYTES[layout.kv_dtype], layout.ring_rows(layer)
    block_bytes = layer.key_width * KEY_BLOCK * size
    blocks = rows // KEY_BLOCK
    keys = parts[0][: layer.kv_heads * blocks * block_bytes]
    yield keys.reshape(layer.kv_heads, blocks, block_bytes)[:, : -(-count // KEY_BLOCK)]
    row_bytes = layer.value_width * size
    values = parts[1][: layer.kv_heads * rows * row_bytes]
    yield values.reshape(layer.kv_heads, rows, row_bytes)[:, :count]


def _filled_stream(
    layout: StateLayout,
    stream: CompressedStream,
    parts: tuple[Bytes, Bytes],
    pending: int,
    written: int,
) -> Iterator[Bytes]:
    """The first `pending` projected rows, and `written` compressed ones, in whole blocks."""
    yield parts[0][: pending * 2 * stream.projected * STORAGE_BYTES["f32"]]
    blocks = -(-written // KEY_BLOCK)
    yield parts[1][: blocks * KEY_BLOCK * stream.width * STORAGE_BYTES[layout.kv_dtype]]


def mutated_states(layout: StateLayout, memory: Bytes) -> Iterator[Bytes]:
    """Views of the buffers that steps change."""
    for state, buffer in zip(layout.named, named_states(layout, memory), strict=True):
        if not state.given:
            yield buffer


def named_states(layout: StateLayout, memory: Bytes) -> Iterator[Bytes]:
    """Views of the model's own buffers."""
    words = memory[: 8 * layout.header_words].view(np.int64)
    offsets = words[HEADER_WORDS + LAYER_WORDS * len(layout.entries) :]
    for state, offset in zip(layout.named, offsets, strict=True):
        yield memory[layout.header_bytes + int(offset) :][: state.nbytes]
