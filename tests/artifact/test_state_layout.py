"""The state of compressed attention: where it lies, and what of it a session may still use."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from bessemer.artifact.layout import (
    ALIGN,
    HEADER_WORDS,
    LAYER_WORDS,
    CompressedStream,
    KVLayer,
    NamedState,
    SharedLayer,
    StateLayout,
)
from bessemer.runtime.state import Held, filled, mutated_states, usable

STREAMS = (
    CompressedStream(0, "kv", 12, 4, True),
    CompressedStream(0, "index", 8, 4, True),
    CompressedStream(2, "kv", 12, 6, False),
)
MIXED = StateLayout(
    (KVLayer(1, 2, 8, 4, 0),),
    "f16",
    100,
    16,
    named=(NamedState("given", "f32", (2, 3), True), NamedState("sum", "i64", (1,))),
    shared=(SharedLayer(0, 12, 8), SharedLayer(2, 12, 8)),
    streams=STREAMS,
)


def test_regions_follow_each_other_without_overlap() -> None:
    words = [int(w) for w in MIXED.header()]
    assert len(words) == MIXED.header_words == HEADER_WORDS + 6 * LAYER_WORDS + 2
    regions = []
    for i, entry in enumerate(MIXED.entries):
        first, second, rows, more = words[HEADER_WORDS + LAYER_WORDS * i :][:LAYER_WORDS]
        sizes = MIXED.region_bytes(entry)
        regions += [(first, first + sizes[0]), (second, second + sizes[1])]
        if isinstance(entry, CompressedStream):
            assert (rows, more) == (MIXED.pending_rows(entry), MIXED.compressed_rows(entry))
        else:
            assert (rows, more) == (MIXED.ring_rows(entry), 0)
    regions += [(o, o + s.nbytes) for o, s in zip(words[-2:], MIXED.named, strict=True)]
    for (_, end), (start, _) in pairwise(regions):
        assert start % ALIGN == 0
        assert end <= start
    assert regions[-1][1] <= words[2]


def test_layouts_are_kept_in_json() -> None:
    assert StateLayout.from_json(json.loads(json.dumps(MIXED.to_json()))) == MIXED


@pytest.mark.parametrize("stream", STREAMS)
def test_rings_hold_what_a_chunk_pools_from(stream: CompressedStream) -> None:
    """Wherever a chunk begins, and however long it is: rows are written before any is pooled."""
    rows = MIXED.pending_rows(stream)
    for start, size in product(range(30), range(1, MIXED.chunk + 1)):
        held: dict[int, int] = {}
        for position in range(start + size):
            held[position % rows] = position
        for end in range(start + 1, start + size + 1):
            if end % stream.rate == 0:
                wanted = range(max(0, end - stream.reach), end)
                assert all(held[p % rows] == p for p in wanted), (start, size, end)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_rewound_session_uses_what_the_ring_still_has(stream: CompressedStream) -> None:
    """As many tokens as may be kept, exactly: no row that is needed again has been replaced."""
    layout = StateLayout((), "f16", 100, 4, streams=(stream,))
    rows = layout.pending_rows(stream)
    for high, keep in product((5, 17, 30, 47), range(1, 48)):
        if keep > high:
            continue
        held = {p % rows: p for p in range(high)}
        end = (keep // stream.rate + 1) * stream.rate  # where the next compressed row is made
        needed = range(max(0, end - stream.reach), keep)
        there = all(held.get(p % rows) == p for p in needed)
        found = usable(layout, Held(keep, keep, high), keep, 0)
        assert found == (keep if there else 0), (high, keep)


def test_shared_windows_and_given_buffers() -> None:
    layout = replace(MIXED, streams=(), layers=(), named=MIXED.named[:1])
    rows = layout.ring_rows(layout.shared[0])
    assert not layout.mutates
    assert usable(layout, Held(60, 60, 60), 59, 0) == 59
    assert usable(layout, Held(99, 99, 99), 99 - rows + 8 - 1, 0) == 99 - rows + 8 - 1
    assert usable(layout, Held(99, 99, 99), 99 - rows + 8 - 2, 0) == 0
    assert MIXED.mutates
    assert usable(MIXED, Held(60, 60, 60), 59, 0) == 0


def test_what_tokens_fill_grows_with_them() -> None:
    """Copies and files hold the written rows alone, and given buffers, which steps don't change."""
    memory = np.zeros(MIXED.nbytes, np.uint8)
    header = MIXED.header()
    memory[: header.nbytes] = header.view(np.uint8)
    sizes = [sum(part.size for part in filled(MIXED, memory, n)) for n in (0, 1, 5, 40, 100)]
    assert sizes == sorted(sizes)
    assert sizes[0] == sum(state.nbytes for state in MIXED.named)
    assert sizes[-1] < MIXED.nbytes
    assert [b.size for b in mutated_states(MIXED, memory)] == [8]
