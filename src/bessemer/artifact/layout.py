"""How bytes lie in an artifact: stored weights and the session's state.

Shared by code generation (which emits the addresses) and the runtime (which fills the memory), so
that both read one definition. Nothing here imports torch or MLIR.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
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
HEADER_WORDS = 8  # magic, version, slot bytes, entries, named states, capacity, chunk, 0
# Words of an entry: two offsets (bytes from the slot's base) and two numbers of rows. Of a KVLayer:
# keys, values, ring rows, 0. Of a SharedLayer: rows, 0, ring rows, 0. Of a CompressedStream:
# pending rows, compressed rows, how many of the first, how many of the second.
LAYER_WORDS = 4

# What compressed rows are for: keys and values of the attention, or keys of the index over these.
STREAMS = ("kv", "index")

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


def matrix_format(weights: Sequence[StoredWeight]) -> str | None:
    """The storage of most numbers of the matrices; a few stay in f32 in every format."""
    counts: Counter[str] = Counter()
    for weight in weights:
        if weight.layout == "panels":
            counts[weight.dtype] += math.prod(weight.shape)
    return counts.most_common(1)[0][0] if counts else None


@dataclass(frozen=True)
class KVLayer:
    """The cache of one attention layer. window: 0 for full attention."""

    layer: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int


@dataclass(frozen=True)
class SharedLayer:
    """The window of a layer of one KV head whose keys are its values: one row for each position.

    width: of a row.  window: positions that a query sees, itself among them.
    """

    layer: int
    width: int
    window: int


@dataclass(frozen=True)
class CompressedStream:
    """Rows that stand for `rate` positions each, and what they are pooled from.

    stream: one of STREAMS.
    width: of a compressed row.  overlap: a row is pooled from its own positions and those of the
    row before; a projected row then holds a part for each of the two, side by side.
    """

    layer: int
    stream: str
    width: int
    rate: int
    overlap: bool

    @property
    def projected(self) -> int:
        """Width of the projected rows, of which compressed rows are pooled."""
        return 2 * self.width if self.overlap else self.width

    @property
    def reach(self) -> int:
        """Positions that a compressed row is pooled from, the last of its own at the end."""
        return 2 * self.rate if self.overlap else self.rate

    def first_needed(self, position: int) -> int:
        """The first position whose projected row the next compressed row needs, when the tokens
        below `position` have been seen.
        """
        return max(0, position // self.rate * self.rate + self.rate - self.reach)


Entry = KVLayer | SharedLayer | CompressedStream


@dataclass(frozen=True)
class NamedState:
    """A buffer of a model, zeros at the start.

    given: the model only reads it; what it holds is the caller's to say, and no step changes it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    given: bool = False

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * STORAGE_BYTES[self.dtype]


@dataclass(frozen=True)
class StateLayout:
    """The state memory of a session: a header of int64 words, then one region per slot.

    Keys of a layer are [kv_heads][rows/32][key_width][32], values [kv_heads][rows][value_width].
    Position p of the sequence is row p % rows: full layers have rows >= capacity and never wrap,
    windowed layers keep a ring that holds the window and a chunk.

    A shared layer keeps [rows][width] in such a ring, in the cache's element. A compressed stream
    keeps a ring of projected rows, f32 [rows][2][projected]: the values and their gates, of a chunk
    and of what a compressed row at its start is pooled from; and the compressed rows, never
    dropped, in the cache's element: [rows][width] of "kv", [rows/32][width][32] of "index".
    """

    layers: tuple[KVLayer, ...]
    kv_dtype: str
    capacity: int
    chunk: int
    slots: int = 1
    named: tuple[NamedState, ...] = field(default=())
    shared: tuple[SharedLayer, ...] = field(default=())
    streams: tuple[CompressedStream, ...] = field(default=())

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What the header describes, in its order."""
        return (*self.layers, *self.shared, *self.streams)

    def ring_rows(self, layer: KVLayer | SharedLayer) -> int:
        rows = self.capacity
        if layer.window:
            # A chunk's first row still sees window-1 rows before it; one more block, since a
            # block of keys never straddles the ring's end.
            rows = min(rows, layer.window + self.chunk - 1 + KEY_BLOCK)
        return align(rows, KEY_BLOCK)

    def pending_rows(self, stream: CompressedStream) -> int:
        """Rows of a stream's ring of projected rows: at the first row of a chunk it still has all
        that the compressed row which ends there is pooled from.
        """
        return min(self.capacity, self.chunk - 1 + stream.reach)

    def compressed_rows(self, stream: CompressedStream) -> int:
        """Compressed rows of a full context, in whole blocks."""
        return align(max(1, self.capacity // stream.rate), KEY_BLOCK)

    @property
    def mutates(self) -> bool:
        """Whether steps change buffers of the model's own, which can't be taken back."""
        return any(not state.given for state in self.named)

    @property
    def header_words(self) -> int:
        return HEADER_WORDS + LAYER_WORDS * len(self.entries) + len(self.named)

    @property
    def header_bytes(self) -> int:
        return align(8 * self.header_words, PAGE)

    def region_bytes(self, entry: Entry) -> tuple[int, int]:
        """Bytes behind the two offsets of an entry."""
        size = STORAGE_BYTES[self.kv_dtype]
        if isinstance(entry, KVLayer):
            rows = self.ring_rows(entry) * entry.kv_heads * size
            return rows * entry.key_width, rows * entry.value_width
        if isinstance(entry, SharedLayer):
            return self.ring_rows(entry) * entry.width * size, 0
        pending = self.pending_rows(entry) * 2 * entry.projected * STORAGE_BYTES["f32"]
        return pending, self.compressed_rows(entry) * entry.width * size

    def _regions(self) -> tuple[list[tuple[int, int, int, int]], list[int], int]:
        """The words of each entry, offsets of named states, bytes of a slot."""
        at, entries, named = 0, [], []
        for entry in self.entries:
            first, second = self.region_bytes(entry)
            other = align(at + first)
            if isinstance(entry, CompressedStream):
                rows = (self.pending_rows(entry), self.compressed_rows(entry))
            else:
                rows = (self.ring_rows(entry), 0)
            entries.append((at, other, *rows))
            at = align(other + second)
        for state in self.named:
            named.append(at)
            at = align(at + state.nbytes)
        return entries, named, align(at, PAGE)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole state memory. Needs PAGE alignment."""
        return self.header_bytes + self.slots * self._regions()[2]

    def header(self) -> np.ndarray:
        """The header words, int64[header_words]. Slot s begins at header_bytes + s * slot bytes;
        entry i (in the order of `entries`) is at HEADER_WORDS + LAYER_WORDS * i.
        """
        entries, named, slot_bytes = self._regions()
        words = [STATE_MAGIC, 1, slot_bytes, len(entries), len(named), self.capacity, self.chunk]
        words.append(self.header_bytes)
        for entry in entries:
            words += entry
        return np.array([*words, *named], dtype=np.int64)

    def named_offsets(self) -> dict[str, int]:
        """Byte offset of each named state of slot 0 from the start of the state memory."""
        offsets = self._regions()[1]
        return {s.name: self.header_bytes + o for s, o in zip(self.named, offsets, strict=True)}

    def kv_bytes_per_token(self) -> int:
        """Bytes that a token adds: its keys and values, and its share of compressed rows (rounded
        up over all layers). The rings of shared layers and of projected rows don't grow.
        """
        size = STORAGE_BYTES[self.kv_dtype]
        whole = sum(x.kv_heads * (x.key_width + x.value_width) * size for x in self.layers)
        shares = sum((Fraction(x.width * size, x.rate) for x in self.streams), Fraction())
        return whole + math.ceil(shares)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StateLayout:
        named = tuple(
            NamedState(n["name"], n["dtype"], tuple(n["shape"]), n["given"]) for n in data["named"]
        )
        tables: dict[str, type] = {
            "layers": KVLayer,
            "shared": SharedLayer,
            "streams": CompressedStream,
        }
        found = {key: tuple(kind(**x) for x in data[key]) for key, kind in tables.items()}
        return cls(**{**data, **found, "named": named})


@dataclass(frozen=True)
class ScratchLayout:
    """Memory of a session for activations: one shared arena, then a part for each thread."""

    shared_bytes: int
    thread_bytes: int

    def nbytes(self, threads: int) -> int:
        return self.shared_bytes + threads * self.thread_bytes
