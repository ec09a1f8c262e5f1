"""Compressed rows, the choice among them and attention over them, against the graph's references:
both lowerings, odd sizes, rows fed in chunks and one by one, any split.
"""

import numpy as np
import pytest

from tests.codegen.compressed_case import CompressedLayer, f32

LENGTH = 70
# Chunks of at most 16 rows that cross windows at every place, single rows among them.
CHUNKS = (1, 16, 3, 4, 1, 1, 15, 2, 1, 9, 16, 1)


def chunks() -> list[np.ndarray]:
    ends = np.cumsum(CHUNKS)
    assert ends[-1] == LENGTH
    return [np.arange(end - n, end) for n, end in zip(CHUNKS, ends, strict=True)]


def all_close(got: np.ndarray, wanted: np.ndarray, tolerance: float = 2e-6) -> None:
    error = np.abs(got - wanted).max() / max(float(np.abs(wanted).max()), 1e-30)
    assert error < tolerance, error


@pytest.mark.parametrize(
    ("rate", "overlap", "generic"),
    [(4, True, False), (8, False, False), (3, True, False), (4, True, True), (8, False, True)],
)
def test_compressed_rows(rate: int, overlap: bool, generic: bool) -> None:
    """Rows of both streams, after every chunk; the ring of projected rows wraps."""
    layer = CompressedLayer(
        rate=rate, overlap=overlap, generic=generic, width=44, rotary=6, index_width=12, chunk=16
    )
    for i, positions in enumerate(chunks()):
        for stream in ("kv", "index"):
            visible = layer.compress(positions, stream, threads=1 + i % 3)
            rows = layer.env.windows[0, stream].stacked(int(visible[-1]), layer.widths[stream])
            if len(rows):
                all_close(layer.compressed(stream)[: len(rows)], rows)


@pytest.mark.parametrize("generic", [False, True])
def test_rounded_rows(generic: bool) -> None:
    """E4M3 and f16 rounding of the one stream, Hadamard and E2M1 of the other: the same numbers,
    but for those that lie at the edge between two steps.
    """
    rounds = {"kv": "e4m3", "index": "e2m1"}
    layer = CompressedLayer(width=72, rotary=8, index_width=32, rounds=rounds, generic=generic)
    for positions in chunks():
        for stream in ("kv", "index"):
            layer.compress(positions, stream)
    for stream in ("kv", "index"):
        rows = layer.env.windows[0, stream].stacked(LENGTH // 4, layer.widths[stream])
        same = np.isclose(layer.compressed(stream)[: len(rows)], rows, rtol=1e-6)
        assert same.mean() > 0.995


@pytest.mark.parametrize(
    ("heads", "ks", "generic"), [(3, (1, 5, 33), False), (13, (5,), False), (3, (5,), True)]
)
def test_choice(heads: int, ks: tuple[int, ...], generic: bool) -> None:
    """Fewer, as many and more visible rows than are wanted; one query row and several."""
    layer = CompressedLayer(generic=generic, rate=2, capacity=140)
    for positions in chunks():
        visible = layer.compress(positions, "index")
        for k in ks:
            out, wanted = layer.choose(visible, k, heads, threads=1 + len(positions) % 3)
            assert np.array_equal(out, wanted), k


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_ties_go_to_the_lowest_row(rows: int, generic: bool) -> None:
    """ReLU makes many scores exactly 0; NaN counts as the least of all."""
    layer = CompressedLayer(generic=generic, rate=1, overlap=False, capacity=70)
    for positions in chunks():
        layer.compress(positions, "index")
    visible = np.full(rows, LENGTH - 3, np.int64)
    q, zero = f32(layer.rng, rows, 2, 16), np.zeros((rows, 2), np.float32)
    out, wanted = layer.choose(visible, 9, 2, q=q, weights=zero)
    assert np.array_equal(out, wanted)
    assert np.array_equal(out[0], np.arange(9))
    q[:, 0] = -np.abs(q[:, 0]) * 0
    out, wanted = layer.choose(visible, 9, 2, q=q)
    assert np.array_equal(out, wanted)
    out, _ = layer.choose(visible, 9, 2, q=np.full_like(q, np.nan))
    assert np.array_equal(out[0], np.arange(9))


@pytest.mark.parametrize(("heads", "width", "lanes"), [(1, 32, 8), (5, 36, 8), (13, 64, 4)])
def test_attention(heads: int, width: int, lanes: int) -> None:
    """Window alone, with all compressed rows, with chosen ones; with and without sinks."""
    layer = CompressedLayer(width=width, lanes=lanes)
    sinks = f32(layer.rng, heads)
    for positions in chunks():
        threads = 1 + len(positions) % 3
        visible = layer.compress(positions, "kv")
        out, wanted = layer.attend(positions, heads, threads=threads)
        all_close(out, wanted)
        out, wanted = layer.attend(positions, heads, threads=threads, sinks=sinks, visible=visible)
        all_close(out, wanted)
        chosen = np.full((len(positions), 5), -1, np.int64)
        for t, n in enumerate(visible):
            some = np.sort(layer.rng.permutation(int(n))[:5])
            chosen[t, : len(some)] = some
        out, wanted = layer.attend(
            positions, heads, threads=threads, sinks=sinks, visible=visible, indices=chosen
        )
        all_close(out, wanted)


def test_attention_by_plain_loops() -> None:
    """The generic lowering, and a cache of f16 rows."""
    layers = [CompressedLayer(kv="f16", generic=generic, window=40) for generic in (False, True)]
    for positions in chunks():
        found = []
        for layer in layers:
            visible = layer.compress(positions, "kv")
            chosen = np.where(visible[:, None] > np.arange(3), np.arange(3), -1)
            sinks = np.zeros(3, np.float32)
            for extra in ({}, {"visible": visible}, {"visible": visible, "indices": chosen}):
                out, wanted = layer.attend(positions, 3, sinks=sinks, **extra)
                all_close(out, wanted, 2e-3)
                found.append(out)
        for a, b in zip(found[:3], found[3:], strict=True):
            all_close(a, b)


def test_rows_behind_the_rewound_end_are_dead() -> None:
    """Feeding again from an earlier position replaces what was there."""
    layer = CompressedLayer(chunk=16, capacity=70)
    for positions in chunks()[:5]:
        layer.compress(positions, "kv")
        layer.compress(positions, "index")
        layer.attend(positions, 2)
    for start in (20, 13, 12):
        positions = np.arange(start, start + 7)
        visible = layer.compress(positions, "kv")
        layer.compress(positions, "index")
        out, wanted = layer.attend(positions, 2, visible=visible)
        all_close(out, wanted)
        assert np.array_equal(*layer.choose(visible, 2, 3))
