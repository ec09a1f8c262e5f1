"""Attention with its cache as states computes what the op does, call after call."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.graph import Dim, DType, Env, Graph, Value, emit, evaluate, print_graph, verify
from bessemer.passes.explicit_cache import ExplicitCache
from bessemer.passes.from_the_start import FromTheStart

T = Dim.sym("T")
HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, CAPACITY = 4, 2, 3, 5, 12


def tensor(name: str, *shape: object, dtype: DType = DType.F32) -> Value:
    return emit("input", name=name, dtype=dtype, shape=shape)


def graph(sinks: bool, **attrs: object) -> Graph:
    """One layer 0 and one layer 10, the second on the result of the first."""
    positions = tensor("positions", T, dtype=DType.I64)
    q, k = tensor("q", T, HEADS, WIDTH), tensor("k", T, KV_HEADS, WIDTH)
    v = tensor("v", T, KV_HEADS, VALUE_WIDTH)
    more = [tensor("sinks", HEADS)] if sinks else []
    settings = {"scale": 0.7, "has_sinks": sinks, **attrs}
    first = emit("attention", q, k, v, positions, *more, layer=0, **settings)
    again = emit("slice", first, axis=-1, start=0, stop=WIDTH)
    second = emit("flash_attention", again, k, v, positions, *more, layer=10, **settings)
    return Graph("g", {"y": second})


def inputs(rng: np.random.Generator, start: int, rows: int, sinks: np.ndarray) -> dict:
    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal((rows, *shape)).astype(np.float32) * 2

    return {
        "q": draw(HEADS, WIDTH),
        "k": draw(KV_HEADS, WIDTH),
        "v": draw(KV_HEADS, VALUE_WIDTH),
        "positions": np.arange(start, start + rows),
        "sinks": sinks,
    }


@pytest.mark.parametrize(
    ("sinks", "attrs"),
    [(False, {}), (False, {"window": 3}), (False, {"softcap": 1.5}), (True, {"window": 5})],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_equals_the_op(sinks: bool, attrs: dict[str, object]) -> None:
    before = graph(sinks, **attrs)
    after = ExplicitCache(CAPACITY).apply(before)
    verify(after)
    assert not any("attention" in node.op for node in after)
    names = [f"cache.{layer}.{kind}" for layer in (0, 10) for kind in ("keys", "values")]
    assert list(after.updates) == names
    rng = np.random.default_rng(1)
    sink_scores = rng.standard_normal(HEADS).astype(np.float32)
    env, states = Env(), Env()
    for start, rows in ((0, 6), (6, 1), (7, 3), (10, 2)):
        given = inputs(rng, start, rows, sink_scores)
        want = evaluate(before, given, {}.__getitem__, env)["y"]
        got = evaluate(after, given, {}.__getitem__, states)["y"]
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_narrow_cache_rounds_what_it_holds() -> None:
    """Keys and values of the same call are read from the cache, too."""
    before, after = graph(False), ExplicitCache(CAPACITY, DType.F16).apply(graph(False))
    given = inputs(np.random.default_rng(2), 0, 5, np.zeros(HEADS, np.float32))
    got = evaluate(after, given, {}.__getitem__, Env())["y"]
    rounded = {n: given[n].astype(np.float16).astype(np.float32) for n in ("k", "v")}
    want = evaluate(before, {**given, **rounded}, {}.__getitem__, Env())["y"]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def test_from_the_start() -> None:
    """Positions are no input any more."""
    before = graph(False)
    after = FromTheStart().apply(before)
    verify(after)
    assert '"positions"' not in print_graph(after)
    given = inputs(np.random.default_rng(3), 0, 7, np.zeros(HEADS, np.float32))
    want = evaluate(before, given, {}.__getitem__, Env())["y"]
    np.testing.assert_array_equal(evaluate(after, given, {}.__getitem__, Env())["y"], want)
