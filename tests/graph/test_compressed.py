"""Compressed attention in NumPy: the three ops against loops that say what they mean."""

import numpy as np
import pytest

from bessemer.graph import Env, GraphError, build, constant, evaluate_node
from bessemer.graph.ops.compressed import choose

CLOSE = {"rtol": 2e-5, "atol": 2e-6}
WIDTH, ROTARY, EPS = 12, 4, 1e-6


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(op, arrays, env, **attrs):
    node = build(op, [constant(a) for a in arrays], **attrs)
    (result,) = evaluate_node(node, list(map(np.asarray, arrays)), env)
    assert result.shape == node.types[0].shape
    return result


class Stream:
    """Random token rows of one stream, and the compressed rows that they stand for."""

    def __init__(self, tokens, rate, overlap, seed=0):
        self.rate, self.overlap = rate, overlap
        self.parts = 2 if overlap else 1
        wide = self.parts * WIDTH
        self.kv, self.gate = floats(tokens, wide, seed=seed), floats(tokens, wide, seed=seed + 1)
        self.bias, self.norm = floats(rate, wide, seed=seed + 2), floats(WIDTH, seed=seed + 3)
        angles = floats(tokens, ROTARY // 2, seed=seed + 4)
        self.cos, self.sin = np.cos(angles), np.sin(angles)

    def attrs(self, **more):
        return {"layer": 0, "rate": self.rate, "overlap": self.overlap, "eps": EPS, **more}

    def feed(self, env, begin, end, **more):
        at = np.arange(begin, end)
        rows = [a[begin:end] for a in (self.kv, self.gate)]
        tables = [a[begin:end] for a in (self.cos, self.sin)]
        operands = [*rows, self.bias, self.norm, *tables, at]
        return run("block_compress", operands, env, **self.attrs(**more))

    def row(self, number):
        """Compressed row `number`, element by element."""
        rate = self.rate
        total, weighted = np.zeros(WIDTH), np.zeros(WIDTH)
        for back in range(self.parts):  # 0: the row's own window, 1: the one before
            window = number - back
            if window < 0:
                continue
            columns = slice((self.parts - 1 - back) * WIDTH, (self.parts - back) * WIDTH)
            for j in range(rate):
                t = window * rate + j
                weight = np.exp(self.gate[t, columns].astype(float) + self.bias[j, columns])
                total += weight
                weighted += weight * self.kv[t, columns]
        pooled = weighted / total
        normed = pooled / np.sqrt((pooled**2).mean() + EPS) * self.norm
        closing = number * rate + rate - 1
        for pair in range(ROTARY // 2):
            i = WIDTH - ROTARY + 2 * pair
            a, b = normed[i], normed[i + 1]
            c, s = self.cos[closing, pair], self.sin[closing, pair]
            normed[i], normed[i + 1] = a * c - b * s, a * s + b * c
        return normed


@pytest.mark.parametrize(("rate", "overlap"), [(4, True), (8, False), (3, True), (1, False)])
def test_compressed_rows(rate, overlap):
    tokens = 26
    stream, env = Stream(tokens, rate, overlap), Env()
    visible = stream.feed(env, 0, tokens)
    assert visible.tolist() == [(p + 1) // rate for p in range(tokens)]
    rows = env.windows[0, "kv"].rows
    assert sorted(rows) == list(range(tokens // rate))
    for number, row in rows.items():
        np.testing.assert_allclose(row, stream.row(number), **CLOSE)


@pytest.mark.parametrize("overlap", [True, False])
def test_chunks_give_the_same_rows_as_the_whole(overlap):
    tokens, rate = 23, 4
    stream, whole = Stream(tokens, rate, overlap), Env()
    stream.feed(whole, 0, tokens)
    for split in range(1, tokens):
        env = Env()
        stream.feed(env, 0, split)
        stream.feed(env, split, tokens)
        for number, row in whole.windows[0, "kv"].rows.items():
            np.testing.assert_array_equal(env.windows[0, "kv"].rows[number], row)


def test_what_is_fed_again_replaces_what_was_there():
    tokens, rate = 14, 4
    right, wrong = Stream(tokens, rate, True), Stream(tokens, rate, True, seed=9)
    wrong.bias, wrong.norm = right.bias, right.norm
    for keep in range(1, tokens):
        env = Env()
        right.feed(env, 0, keep)
        wrong.feed(env, keep, tokens)
        right.feed(env, keep, tokens)
        for number, row in env.windows[0, "kv"].rows.items():
            np.testing.assert_allclose(row, right.row(number), **CLOSE)


# --- the index -----------------------------------------------------------------------------------


def test_the_lowest_index_wins_among_equal_scores():
    assert choose(np.array([0.0, 3, 0, 0, 3], np.float32), 3).tolist() == [0, 1, 4]
    assert choose(np.zeros(5, np.float32), 2).tolist() == [0, 1]
    assert choose(np.array([1.0, 2, 2, 2], np.float32), 2).tolist() == [1, 2]
    assert choose(np.array([-1.0, -0.0, 0.0], np.float32), 1).tolist() == [1]


def test_fewer_rows_than_wanted_are_followed_by_minus_one():
    assert choose(np.array([5.0, 1], np.float32), 4).tolist() == [0, 1, -1, -1]
    assert choose(np.zeros(0, np.float32), 2).tolist() == [-1, -1]


def test_a_score_that_is_no_number_counts_as_the_least():
    assert choose(np.array([np.nan, 1, -5], np.float32), 2).tolist() == [1, 2]
    assert choose(np.array([np.nan, np.nan], np.float32), 1).tolist() == [0]


def test_the_index_picks_the_best_visible_rows():
    tokens, rate, k, heads = 23, 4, 3, 2
    stream, env = Stream(tokens, rate, True), Env()
    visible = stream.feed(env, 0, tokens, stream="index")
    q, weights = floats(tokens, heads, WIDTH, seed=7), floats(tokens, heads, seed=8)
    found = run("index_topk", [q, weights, visible], env, layer=0, k=k, scale=0.3)
    for t in range(tokens):
        scores = [
            sum(
                weights[t, h] * max(0.0, float(q[t, h] @ stream.row(s)) * 0.3) for h in range(heads)
            )
            for s in range(visible[t])
        ]
        best = sorted(sorted(range(len(scores)), key=lambda s: (-scores[s], s))[:k])
        assert found[t].tolist() == best + [-1] * (k - len(best))


# --- attention -----------------------------------------------------------------------------------


def expected_attention(q, rows, older, sinks, t, window, chosen, scale):
    """Of token t: over its window and the compressed rows `chosen`, with a sink for each head."""
    keys = [rows[j] for j in range(max(0, t - window + 1), t + 1)] + [older[s] for s in chosen]
    out = np.zeros(q.shape[1:])
    for h in range(q.shape[1]):
        weights = np.exp([float(q[t, h] @ key) * scale for key in keys])
        total = weights.sum() + np.exp(float(sinks[h]))
        out[h] = sum(w * key for w, key in zip(weights, keys, strict=True)) / total
    return out


@pytest.mark.parametrize("kind", ["window", "all", "chosen"])
def test_attention_over_window_and_compressed_rows(kind):
    tokens, rate, window, heads, scale = 21, 4, 5, 3, 0.3
    stream, env = Stream(tokens, rate, True), Env()
    q, kv, sinks = (
        floats(tokens, heads, WIDTH, seed=5),
        floats(tokens, WIDTH, seed=6),
        floats(heads),
    )
    got = []
    for begin, end in ((0, 6), (6, 7), (7, 19), (19, 21)):
        visible = stream.feed(env, begin, end)
        chosen = np.stack([visible - 1, np.where(visible > 2, 0, -1)], -1)
        given = {"window": [], "all": [visible], "chosen": [visible, chosen]}[kind]
        operands = [q[begin:end], kv[begin:end], np.arange(begin, end), sinks, *given]
        has = {"has_visible": kind != "window", "has_indices": kind == "chosen"}
        attrs = {"layer": 0, "scale": scale, "window": window, "has_sinks": True, **has}
        got.append(run("compressed_attention", operands, env, **attrs))
    older = [stream.row(s) for s in range(tokens // rate)]
    for t, row in enumerate(np.concatenate(got)):
        seen = (t + 1) // rate
        some = {"window": [], "all": range(seen)}.get(kind)
        if some is None:
            some = {seen - 1, *([0] if seen > 2 else [])} - {-1}
        want = expected_attention(q, kv, older, sinks, t, window, sorted(some), scale)
        np.testing.assert_allclose(row, want, rtol=1e-4, atol=1e-5)


# --- nothing to see ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["none", "e4m3", "e2m1"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_before_the_first_block_there_are_no_rows(tokens, how):
    """Fewer tokens than the rate, in low precision or not; and a call without tokens."""
    width, heads, k, env = 64 + ROTARY if how == "e4m3" else 64, 2, 3, Env()
    wide = [floats(tokens, width), floats(tokens, width, seed=1)]
    tables = [np.ones((tokens, ROTARY // 2), np.float32)] * 2
    at = np.arange(tokens)
    operands = [*wide, floats(4, width), floats(width), *tables, at]
    for stream in ("kv", "index"):
        attrs = {"layer": 0, "rate": 4, "eps": EPS, "round": how, "stream": stream}
        visible = run("block_compress", operands, env, **attrs)
    assert visible.tolist() == [0] * tokens
    q, weights = floats(tokens, heads, width, seed=2), floats(tokens, heads)
    chosen = run("index_topk", [q, weights, visible], env, layer=0, k=k, scale=1.0)
    assert chosen.tolist() == [[-1] * k] * tokens
    given = {"has_visible": True, "has_indices": True}
    operands = [q, wide[0], at, visible, chosen]
    got = run("compressed_attention", operands, env, layer=0, scale=1.0, window=1, **given)
    want = np.broadcast_to(wide[0][:, None], q.shape)  # each token sees itself alone
    np.testing.assert_allclose(got, want, **CLOSE)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"overlap": True},
        {"rate": 5},
        {"stream": "other"},
        {"round": "e5m2"},
        {"round": "e2m1"},
        {"round": "e4m3"},
    ],
    ids=str,
)
def test_operands_that_do_not_fit_are_refused(change):
    stream = Stream(8, 4, False)
    at = np.arange(8)
    operands = [stream.kv, stream.gate, stream.bias, stream.norm, stream.cos, stream.sin, at]
    with pytest.raises(GraphError, match=r"block_compress|rounded|blocks|power of two"):
        build("block_compress", [constant(a) for a in operands], **stream.attrs(**change))


def test_indices_without_visible_rows_are_refused():
    q, kv, at = floats(4, 2, 8), floats(4, 8), np.arange(4)
    operands = [constant(a) for a in (q, kv, at, np.zeros((4, 2), np.int64))]
    with pytest.raises(GraphError, match="need visible"):
        build("compressed_attention", operands, layer=0, scale=1.0, window=2, has_indices=True)
