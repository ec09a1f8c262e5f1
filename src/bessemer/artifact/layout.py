"""How bytes lie in an artifact: stored weights and the session's state.

Shared by code generation (which emits the addresses) and the runtime (which fills the memory), so
that both read one definition. Nothing here imports torch or MLIR.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

# Rows of a weight panel, the same for every target: two f32 AVX-512 vectors, four of AVX2, eight
# of NEON, and one cache line of f16.
PANEL_ROWS = 32
# Keys of a K-cache block: a vector tile of scores is computed per block without horizontal sums.
KEY_BLOCK = 32
# Alignment of every weight, state and scratch region: a cache line.
ALIGN = 64
# Alignment of the big weights: a page, so that huge pages and prefetchers see whole streams.
PAGE = 4096

STATE_MAGIC = 0x314D5342  # "BSM1"
HEADER_WORDS = 8  # magic, version, slot bytes, layers, named states, capacity, chunk, 0
LAYER_WORDS = 4  # k offset, v offset (bytes from the slot's base), ring rows, 0

# Depth of a q8_0 block: as in GGUF, 32 weights of a row share one f16 scale.
Q8_DEPTH = 32
# Depths that lie side by side for each row: what an instruction takes that multiplies pairs.
Q8_PAIR = 2
# Bytes of one block of a q8_0 panel: 32 deep x 32 rows of int8, by pairs of depths
# [16][32 rows][2], then the rows' 32 scales. 17 whole cache lines, so that weights and scales are
# one aligned stream.
Q8_SCALES_AT = Q8_DEPTH * PANEL_ROWS
Q8_BLOCK_BYTES = Q8_SCALES_AT + 2 * PANEL_ROWS

# Bytes of an element; q8_0 is counted in bytes, see `StoredWeight.stored_shape`.
STORAGE_BYTES = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "q8_0": 1,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "bool": 1,
}


def align(n: int, to: int = ALIGN) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of `weights.bin`.

    shape: logical shape.  dtype: storage ("f32", "f16", "bf16", ...).
    layout: "plain" (row-major), or "panels": the last two dimensions [N, K] are kept as
    [ceil(N/32)][K][32] with missing rows zero; leading dimensions stay outermost. Panels of
    q8_0 are [ceil(N/32)][ceil(K/32)][1088 bytes]: int8 [16][32][2] (depths by pairs) and f16 [32],
    missing depth zero.
    offset, nbytes: place in the file.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    offset: int
    nbytes: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.layout == "plain":
            return self.shape
        *lead, n, k = self.shape
        panels = -(-n // PANEL_ROWS)
        if self.dtype == "q8_0":
            return (*lead, panels, -(-k // Q8_DEPTH), Q8_BLOCK_BYTES)
        return (*lead, panels, k, PANEL_ROWS)

    @classmethod
    def place(
        cls, name: str, shape: tuple[int, ...], dtype: str, layout: str, offset: int
    ) -> StoredWeight:
        """The weight at the next aligned place from `offset`."""
        bare = cls(name, shape, dtype, layout, 0, 0)
        nbytes = int(np.prod(bare.stored_shape, dtype=np.int64)) * STORAGE_BYTES[dtype]
        return cls(
            name, shape, dtype, layout, align(offset, PAGE if nbytes > PAGE else ALIGN), nbytes
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class KVLayer:
    """The cache of one attention layer. window: 0 for full attention."""

    layer: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int


@dataclass(frozen=True)
class NamedState:
    """A mutated buffer of a model: zeros at the start."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * STORAGE_BYTES[self.dtype]


@dataclass(frozen=True)
class StateLayout:
    """The state memory of a session: a header of int64 words, then one region per slot.

    Keys of a layer are [kv_heads][rows/32][key_width][32], values [kv_heads][rows][value_width].
    Position p of the sequence is row p % rows: full layers have rows >= capacity and never wrap,
    windowed layers keep a ring that holds the window and a chunk.
    """

    layers: tuple[KVLayer, ...]
    kv_dtype: str
    capacity: int
    chunk: int
    slots: int = 1
    named: tuple[NamedState, ...] = field(default=())

    def ring_rows(self, layer: KVLayer) -> int:
        rows = self.capacity
        if layer.window:
            # A chunk's first row still sees window-1 rows before it; one more block, since a
            # block of keys never straddles the ring's end.
            rows = min(rows, layer.window + self.chunk - 1 + KEY_BLOCK)
        return align(rows, KEY_BLOCK)

    @property
    def header_words(self) -> int:
        return HEADER_WORDS + LAYER_WORDS * len(self.layers) + len(self.named)

    @property
    def header_bytes(self) -> int:
        return align(8 * self.header_words, PAGE)

    def _regions(self) -> tuple[list[tuple[int, int, int]], list[int], int]:
        """(k offset, v offset, rows) per layer, offsets of named states, bytes of a slot."""
        at, layers, named = 0, [], []
        size = STORAGE_BYTES[self.kv_dtype]
        for layer in self.layers:
            rows = self.ring_rows(layer)
            k = at
            v = align(k + rows * layer.kv_heads * layer.key_width * size)
            at = align(v + rows * layer.kv_heads * layer.value_width * size)
            layers.append((k, v, rows))
        for state in self.named:
            named.append(at)
            at = align(at + state.nbytes)
        return layers, named, align(at, PAGE)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state memory. Needs PAGE alignment."""
        return self.header_bytes + self.slots * self._regions()[2]

    def header(self) -> np.ndarray:
        """The header words, int64[header_words]. Slot s begins at header_bytes + s * slot bytes;
        layer entry i (in the order of `layers`) is at HEADER_WORDS + LAYER_WORDS * i.
        """
        layers, named, slot_bytes = self._regions()
        words = [STATE_MAGIC, 1, slot_bytes, len(layers), len(named), self.capacity, self.chunk]
        words.append(self.header_bytes)
        for k, v, rows in layers:
            words += [k, v, rows, 0]
        return np.array([*words, *named], dtype=np.int64)

    def named_offsets(self) -> dict[str, int]:
        """Byte offset of each named state of slot 0 from the start of the state memory."""
        offsets = self._regions()[1]
        return {s.name: self.header_bytes + o for s, o in zip(self.named, offsets, strict=True)}

    def kv_bytes_per_token(self) -> int:
        size = STORAGE_BYTES[self.kv_dtype]
        return sum(x.kv_heads * (x.key_width + x.value_width) * size for x in self.layers)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StateLayout:
        named = tuple(NamedState(n["name"], n["dtype"], tuple(n["shape"])) for n in data["named"])
        layers = tuple(KVLayer(**layer) for layer in data["layers"])
        return cls(**{**data, "layers": layers, "named": named})


@dataclass(frozen=True)
class ScratchLayout:
    """Memory of a session for activations: one shared arena, then a part for each thread."""

    shared_bytes: int
    thread_bytes: int

    def nbytes(self, threads: int) -> int:
        return self.shared_bytes + threads * self.thread_bytes
