"""Rotary embeddings in many spellings, and near misses that must stay as they are."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.graph import Graph, Value, constant, emit, evaluate
from bessemer.passes import run_passes
from bessemer.passes.canonicalize_views import CanonicalizeViews
from bessemer.passes.common_subexpressions import CommonSubexpressions
from bessemer.passes.linear_forms import linear_form
from bessemer.passes.rope import Rope
from bessemer.passes.sink_repeats import SinkRepeats
from bessemer.passes.sink_transposes import SinkTransposes
from tests.passes.models import F32, T, rotate_half

HEADS, WIDTH = 3, 8
HALF = WIDTH // 2


def rows(name: str, *shape) -> Value:
    return emit("input", name=name, dtype=F32, shape=(T, *shape))


X, ANGLE = rows("x", HEADS, WIDTH), rows("angle", HALF)


def repeated(table: Value) -> Value:
    """[T, half] -> [T, 1, 2 * half], each column twice in a row."""
    pairs = emit("reshape", table, shape=(T, HALF, 1))
    return emit("reshape", emit("expand", pairs, shape=(T, HALF, 2)), shape=(T, 1, WIDTH))


def doubled(table: Value) -> Value:
    """[T, half] -> [T, 1, 2 * half], the columns twice in order."""
    return emit("reshape", emit("concat", table, table, axis=-1), shape=(T, 1, WIDTH))


def part(x: Value, start: int, stop: int, step: int = 1) -> Value:
    return emit("slice", x, axis=-1, start=start, stop=stop, step=step)


def interleave(a: Value, b: Value) -> Value:
    columns = [emit("reshape", v, shape=(T, HEADS, HALF, 1)) for v in (a, b)]
    return emit("reshape", emit("concat", *columns, axis=-1), shape=(T, HEADS, WIDTH))


def product(a: Value, b: Value) -> Value:
    return emit("mul", a, b)


def cos_sin(angle: Value, factor: float = 1.0) -> tuple[Value, Value]:
    return tuple(product(emit(f, angle), constant(factor)) for f in ("cos", "sin"))


def rotate_half_style() -> Value:
    """Llama: tables of doubled angles."""
    angles = emit("concat", ANGLE, ANGLE, axis=-1)
    cos, sin = (emit("reshape", t, shape=(T, 1, WIDTH)) for t in cos_sin(angles))
    return emit("add", product(X, cos), product(rotate_half(X), sin))


def negative_sine() -> Value:
    """x cos - (b, -a) sin."""
    cos, sin = (doubled(t) for t in cos_sin(ANGLE))
    turned = emit("neg", rotate_half(X))
    return emit("sub", product(X, cos), product(turned, sin))


def cohere_style() -> Value:
    cos, sin = (repeated(t) for t in cos_sin(ANGLE))
    even, odd = part(X, 0, WIDTH, 2), part(X, 1, WIDTH, 2)
    return emit("add", product(X, cos), product(interleave(emit("neg", odd), even), sin))


def complex_style() -> Value:
    """Real and imaginary parts of a product of complex numbers."""
    cos, sin = (emit("reshape", t, shape=(T, 1, HALF, 1)) for t in cos_sin(ANGLE))
    pairs = emit("reshape", X, shape=(T, HEADS, HALF, 2))
    a, b = part(pairs, 0, 1), part(pairs, 1, 2)
    real = emit("sub", product(a, cos), product(b, sin))
    imaginary = emit("add", product(a, sin), product(b, cos))
    both = emit("concat", real, imaginary, axis=-1)
    return emit("reshape", both, shape=(T, HEADS, WIDTH))


def scaled_halves() -> Value:
    """gpt_oss: halves apart, tables with YaRN's factor."""
    cos, sin = (emit("reshape", t, shape=(T, 1, HALF)) for t in cos_sin(ANGLE, 1.3))
    a, b = part(X, 0, HALF), part(X, HALF, WIDTH)
    first = emit("sub", product(a, cos), product(b, sin))
    second = emit("add", product(b, cos), product(a, sin))
    return emit("concat", first, second, axis=-1)


def pairs_to_halves() -> Value:
    """DeepSeek: pairs are rotated, and come out as halves."""
    view = emit("reshape", X, shape=(T, HEADS, HALF, 2))
    halves = emit("permute", view, perm=(0, 1, 3, 2))
    x = emit("reshape", halves, shape=(T, HEADS, WIDTH))
    cos, sin = (doubled(t) for t in cos_sin(ANGLE))
    return emit("add", product(x, cos), product(rotate_half(x), sin))


def heads_first() -> Value:
    """With the heads in front, as attention modules have it."""
    x = emit("permute", X, perm=(1, 0, 2))
    cos, sin = (emit("reshape", doubled(t), shape=(1, T, WIDTH)) for t in cos_sin(ANGLE))
    y = emit("add", product(x, cos), product(rotate_half(x), sin))
    return emit("permute", y, perm=(1, 0, 2))


def one_head() -> Value:
    x = rows("one", WIDTH)
    cos, sin = (emit("reshape", doubled(t), shape=(T, WIDTH)) for t in cos_sin(ANGLE))
    return emit("add", product(x, cos), product(rotate_half(x), sin))


def partial_rotary() -> Value:
    x = rows("wide", HEADS, WIDTH + 3)
    cos, sin = (doubled(t) for t in cos_sin(ANGLE))
    turned = part(x, 0, WIDTH)
    y = emit("add", product(turned, cos), product(rotate_half(turned), sin))
    return emit("concat", y, part(x, WIDTH, WIDTH + 3), axis=-1)


def behind_a_norm_with_weights_of_heads() -> Value:
    x = product(X, rows("gain", HEADS, WIDTH))
    cos, sin = (doubled(t) for t in cos_sin(ANGLE))
    return emit("add", product(x, cos), product(rotate_half(x), sin))


SPELLINGS = {
    rotate_half_style: "half",
    negative_sine: "half",
    cohere_style: "interleaved",
    complex_style: "interleaved",
    scaled_halves: "half",
    pairs_to_halves: "interleaved",
    heads_first: "half",
    one_head: "half",
    partial_rotary: "half",
    behind_a_norm_with_weights_of_heads: "half",
}
PASSES = [
    SinkRepeats(),
    CanonicalizeViews(),
    SinkTransposes(),
    CommonSubexpressions(),
    Rope(),
    SinkTransposes(),
]


def fused(value: Value) -> Graph:
    return run_passes(Graph("g", {"y": value}), PASSES)


def values_of(graph: Graph) -> np.ndarray:
    rng = np.random.default_rng(1)
    shapes = {"angle": (HALF,), "gain": (HEADS, WIDTH), "one": (WIDTH,), "x": (HEADS, WIDTH)}
    shapes["wide"] = (HEADS, WIDTH + 3)
    inputs = {n: rng.standard_normal((5, *s)).astype(np.float32) for n, s in shapes.items()}
    return evaluate(graph, inputs, {}.__getitem__)["y"]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda s: s.__name__)
def test_every_spelling_is_one_op(spelling):
    before = Graph("g", {"y": spelling()})
    after = fused(before.outputs["y"])
    ropes = [n for n in after.nodes() if n.op == "rope"]
    assert [n.attrs["style"] for n in ropes] == [SPELLINGS[spelling]]
    assert ropes[0].inputs[1].shape == (T, HALF)
    assert not {"add", "sub", "neg", "concat"} & set(after.op_counts())
    np.testing.assert_allclose(values_of(after), values_of(before), rtol=1e-5, atol=1e-6)


def other_way_round() -> Value:
    cos, sin = (doubled(t) for t in cos_sin(ANGLE))
    return emit("sub", product(X, cos), product(rotate_half(X), sin))


def other_order() -> Value:
    """(a, b) -> (a cos + b sin, b cos + a sin) is no rotation."""
    cos, sin = (doubled(t) for t in cos_sin(ANGLE))
    swapped = emit("concat", part(X, HALF, WIDTH), part(X, 0, HALF), axis=-1)
    return emit("add", product(X, cos), product(swapped, sin))


def same_table() -> Value:
    cos, _ = (doubled(t) for t in cos_sin(ANGLE))
    return emit("add", product(X, cos), product(rotate_half(X), cos))


def uneven_halves() -> Value:
    cos, sin = (doubled(t) for t in cos_sin(ANGLE))
    turned = emit("concat", emit("neg", part(X, 3, WIDTH)), part(X, 0, 3), axis=-1)
    return emit("add", product(X, cos), product(turned, sin))


def different_columns() -> Value:
    """A pair that takes two angles."""
    both = emit("concat", ANGLE, emit("mul", ANGLE, constant(2.0)), axis=-1)
    cos, sin = (emit("reshape", t, shape=(T, 1, WIDTH)) for t in cos_sin(both))
    return emit("add", product(X, cos), product(rotate_half(X), sin))


def two_inputs() -> Value:
    cos, sin = (doubled(t) for t in cos_sin(ANGLE))
    return emit("add", product(X, cos), product(rotate_half(rows("gain", HEADS, WIDTH)), sin))


@pytest.mark.parametrize(
    "spelling",
    [other_way_round, other_order, same_table, uneven_halves, different_columns, two_inputs],
    ids=lambda s: s.__name__,
)
def test_near_misses_stay(spelling):
    before = Graph("g", {"y": spelling()})
    after = fused(before.outputs["y"])
    assert "rope" not in after.op_counts()
    np.testing.assert_allclose(values_of(after), values_of(before), rtol=1e-5, atol=1e-6)


def test_terms_of_a_sum_of_products():
    table = emit("reshape", ANGLE, shape=(T, 1, HALF))
    y = emit("sub", product(part(X, 0, HALF), table), emit("neg", part(X, HALF, WIDTH)))
    first, second = linear_form(y)
    assert first.source == X
    assert first.table == ANGLE
    assert first.index.tolist() == [0, 1, 2, 3]
    assert first.scale.tolist() == [1, 1, 1, 1]
    assert second.table is None
    assert second.index.tolist() == [4, 5, 6, 7]
    assert second.scale.tolist() == [1, 1, 1, 1]


def test_terms_through_concat_and_scalars():
    y = emit("concat", part(X, 2, 3), emit("mul", part(X, 0, 2), constant(-0.5)), axis=-1)
    first, second = linear_form(y)
    assert (first.scale.tolist(), first.index[:1].tolist()) == ([1, 0, 0], [2])
    assert (second.scale.tolist(), second.index[1:].tolist()) == ([0, -0.5, -0.5], [0, 1])


def test_large_expressions_have_no_form():
    y = X
    for i in range(70):
        y = emit("add", y, emit("mul", X, constant(float(i + 1))))
    assert linear_form(y) is None


def test_values_without_a_fixed_last_axis_have_no_form():
    assert linear_form(emit("permute", X, perm=(1, 2, 0))) is None
    assert linear_form(emit("reduce_sum", X, axes=(-1, -2, -3))) is None
