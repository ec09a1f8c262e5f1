"""Where a fusion would change the result, or compute something twice, it keeps away."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.graph import DType, Env, Graph, Value, constant, emit, evaluate, print_graph
from bessemer.passes import pass_by_name
from tests.passes.models import F32, T, weight


def rows(name: str, *shape: int) -> Value:
    return emit("input", name=name, dtype=F32, shape=(T, *(shape or (8,))))


X, Y = rows("x"), rows("y")
POSITIONS = emit("input", name="positions", dtype=DType.I64, shape=(T,))


def linear(x: Value, name: str = "w", width: int = 8, **attrs) -> Value:
    return emit("linear", x, weight(name, width, x.shape[-1]), **attrs)


def norm_of(x: Value, axes=(-1,), keepdims=True, eps: float = 1e-5, of: Value | None = None):
    energy = emit("reduce_mean", emit("mul", of or x, of or x), axes=axes, keepdims=keepdims)
    return emit("mul", x, emit("rsqrt", emit("add", energy, constant(eps))))


def kept(name: str, **outputs: Value):
    graph = Graph("g", outputs)
    assert print_graph(pass_by_name(name).apply(graph)) == print_graph(graph)


def test_a_mean_of_the_square_over_another_axis_is_no_norm():
    square = rows("s", 8, 8)
    kept("rms_norm", y=norm_of(square, axes=(-2,)))
    kept("rms_norm", y=norm_of(X, of=Y))
    kept("rms_norm", y=norm_of(X, axes=(-2,), keepdims=True))


def test_a_variance_of_something_else_is_no_layer_norm():
    centred = emit("sub", X, emit("reduce_mean", Y, axes=(-1,), keepdims=True))
    kept("layer_norm", y=norm_of(centred))
    kept("layer_norm", y=norm_of(X))


def test_a_weight_of_another_shape_stays_outside_the_norm():
    norm = emit("rms_norm", rows("h", 2, 4), eps=1e-5)
    kept("rms_norm", y=emit("mul", norm, weight("w", 2, 4)))


def test_a_norm_with_two_users_is_not_computed_twice():
    norm = emit("rms_norm", X, eps=1e-5)
    kept("rms_norm", y=emit("mul", norm, weight("w", 8)), z=norm)


def test_residuals_must_have_the_type_of_the_linear_layer():
    one = rows("z", 1)
    kept("fuse_epilogues", y=emit("add", linear(X), one))
    kept("fuse_epilogues", y=emit("add", linear(X), weight("b", 8)))


def test_a_linear_layer_with_two_users_has_no_epilogue():
    y = linear(X)
    kept("fuse_epilogues", y=emit("add", y, X), z=y)
    kept("fuse_epilogues", y=emit("mul", y, y))
    kept("fuse_epilogues", y=emit("add", y, y))


def test_nothing_follows_a_residual_inside_an_epilogue():
    y = emit("linear", X, weight("w", 8, 8), Y, has_residual=True)
    kept("fuse_epilogues", y=emit("silu", y))
    kept("fuse_epilogues", y=emit("mul", y, constant(2.0)))
    kept("fuse_epilogues", y=emit("silu", linear(X, scale=0.5)))
    kept("fuse_epilogues", y=emit("silu", linear(X, activation="relu")))
    kept("fuse_epilogues", y=emit("div", constant(1.0), linear(X)))


def test_gate_and_up_of_different_inputs_stay_apart():
    kept("merge_gate_up", y=emit("mul", emit("silu", linear(X)), linear(Y, "v")))
    gate = emit("silu", linear(X))
    kept("merge_gate_up", y=emit("mul", gate, linear(X, "v")), z=gate)
    kept("merge_gate_up", y=emit("mul", emit("exp", linear(X)), linear(X, "v")))


def halves(start: int, middle: int, stop: int, width: int = 8) -> Value:
    y = linear(X, width=width)
    a = emit("slice", y, axis=-1, start=start, stop=middle)
    b = emit("slice", y, axis=-1, start=middle, stop=stop)
    return emit("mul", emit("silu", a), b)


def test_parts_that_are_not_the_halves_are_no_glu():
    kept("glu", y=halves(0, 2, 4))
    kept("glu", y=halves(2, 4, 6))


def test_linear_layers_with_an_epilogue_or_another_input_are_not_merged():
    kept("merge_qkv", a=linear(X), b=linear(Y, "v"))
    kept("merge_qkv", a=linear(X, activation="gelu"), b=linear(X, "v"))
    kept("merge_qkv", a=linear(X, scale=2.0), b=linear(X, "v"))
    kept(
        "merge_qkv", a=emit("linear", X, weight("w", 8, 8), Y, has_residual=True), b=linear(X, "v")
    )


def test_products_of_activations_are_no_linear_layers():
    wide = emit("reshape", emit("slice", X, axis=-2, start=0, stop=4), shape=(8, 4))
    kept("classic_fusion", y=emit("matmul", X, wide))
    kept("classic_fusion", y=emit("add", linear(X), emit("reduce_sum", Y, axes=(-2,))))


def test_slices_of_heads_that_overlap_stay():
    heads = emit("reshape", linear(X), shape=(T, 2, 4))
    a, b = (emit("slice", heads, axis=-1, start=i, stop=i + 3) for i in (0, 1))
    kept("head_rows", a=a, b=b)
    other = emit("slice", heads, axis=-1, start=0, stop=2)
    kept("head_rows", a=other, b=heads)
    kept("head_rows", a=other)


def test_repeats_of_keys_alone_or_of_another_axis_stay():
    q = rows("q", 4, 4)
    once = emit("reshape", rows("k", 8), shape=(T, 2, 1, 4))
    each = emit("reshape", emit("expand", once, shape=(T, 2, 2, 4)), shape=(T, 4, 4))
    first = emit("reshape", rows("k", 8), shape=(T, 1, 2, 4))
    tiled = emit("reshape", emit("expand", first, shape=(T, 2, 2, 4)), shape=(T, 4, 4))
    options = {"layer": 0, "scale": 1.0}
    kept("grouped_queries", y=emit("attention", q, each, q, POSITIONS, **options))
    kept("grouped_queries", y=emit("attention", q, tiled, tiled, POSITIONS, **options))


def shuffled(x: Value) -> Value:
    pairs = emit("reshape", x, shape=(T, 2, 2, 2))
    return emit("reshape", emit("permute", pairs, perm=(0, 1, 3, 2)), shape=(T, 2, 4))


def test_an_order_of_one_side_only_stays():
    q, k = rows("q", 2, 4), rows("k", 2, 4)
    y = emit("attention", shuffled(q), k, k, POSITIONS, layer=0, scale=1.0)
    kept("cancel_shuffles", y=y)
    z = emit("attention", q, k, shuffled(k), POSITIONS, layer=0, scale=1.0)
    kept("cancel_shuffles", y=z)


def test_norms_of_some_heads_or_with_other_options_stay():
    h = rows("h", 3, 4)
    parts = [emit("slice", h, axis=-2, start=i, stop=i + 1) for i in range(3)]
    norms = [emit("rms_norm", p, weight(f"n{i}", 4), eps=1e-5) for i, p in enumerate(parts)]
    kept("head_norms", y=emit("concat", *norms[:2], axis=-2))
    kept("head_norms", y=emit("concat", norms[1], norms[0], norms[2], axis=-2))
    other = emit("rms_norm", parts[2], weight("n2", 4), eps=1e-6)
    kept("head_norms", y=emit("concat", *norms[:2], other, axis=-2))


def test_neutral_elements_that_widen_or_are_not_neutral_stay():
    kept("fold_constants", y=emit("mul", X, constant(np.ones((2, 1, 1), np.float32))))
    kept("fold_constants", y=emit("div", constant(1.0), X))
    kept("fold_constants", y=emit("sub", constant(0.0), X))
    kept("fold_constants", y=emit("cast", X, dtype=DType.F16))
    kept("fold_constants", y=emit("pow", X, constant(2.5)))


def test_large_constants_are_not_made():
    big = emit("mul", emit("iota", size=100_000, dtype=F32), constant(2.0))
    kept("fold_constants", y=big)


def test_zeros_of_either_sign_and_equal_numbers_of_other_types_are_different():
    a, b = constant(0.0), constant(-0.0)
    kept("common_subexpressions", y=emit("add", emit("mul", X, a), emit("mul", X, b)))
    one, true = emit("iota", size=3, start=1), emit("iota", size=3, start=0)
    kept("common_subexpressions", y=one, z=true)


def test_attention_of_different_layers_is_different():
    q = rows("q", 2, 4)
    a, b = (emit("attention", q, q, q, POSITIONS, layer=i, scale=1.0) for i in (0, 1))
    kept("common_subexpressions", y=emit("add", a, b))


def test_transposes_stay_where_another_operand_would_have_to_move():
    a, b = rows("a", 2, 4), emit("input", name="b", dtype=F32, shape=(2, T, 4))
    kept("sink_transposes", y=emit("add", emit("permute", a, perm=(1, 0, 2)), b))
    turned = emit("permute", a, perm=(0, 2, 1))
    kept("sink_transposes", y=emit("rms_norm", turned, eps=1e-5))
    kept("sink_transposes", y=emit("reshape", emit("permute", a, perm=(0, 2, 1)), shape=(T, 8)))


def test_a_batch_of_two_stays():
    ids = emit("input", name="ids", dtype=DType.I64, shape=(2, T))
    kept("drop_batch", y=emit("embedding", weight("e", 9, 4), ids))


def test_the_leading_axis_of_one_is_kept_where_it_is_worked_on():
    one = emit("reshape", X, shape=(1, T, 8))
    graph = Graph("g", {"y": emit("concat", one, one, axis=-3)})
    after = pass_by_name("drop_batch").apply(graph)
    assert after.outputs["y"].shape == (2, T, 8)


@pytest.mark.parametrize("op", ["cumsum", "reduce_max"])
def test_rows_are_not_selected_before_an_op_that_mixes_them(op):
    attrs = {"axis": -2} if op == "cumsum" else {"axes": (-2,), "keepdims": True}
    mixed = emit("add", emit(op, X, **attrs), X)
    graph = Graph("g", {"logits": linear(mixed, width=5)})
    after = pass_by_name("select_rows").apply(graph)
    node = next(n for n in after.nodes() if n.op == op)
    assert node.inputs[0].shape == (T, 8)
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    rows_wanted = np.array([3, 1])
    every = evaluate(graph, {"x": x}, {"w": w}.__getitem__, Env())["logits"]
    inputs = {"x": x, "output_rows": rows_wanted}
    some = evaluate(after, inputs, {"w": w}.__getitem__, Env())["logits"]
    np.testing.assert_allclose(some, every[rows_wanted], rtol=1e-5, atol=1e-6)


def test_logits_that_are_no_linear_layer_have_no_hidden():
    graph = Graph("g", {"logits": emit("softmax", X)})
    assert list(pass_by_name("select_rows").apply(graph).outputs) == ["logits"]


def test_decode_attention_is_for_one_row():
    q = rows("q", 2, 4)
    kept("decode_attention", y=emit("attention", q, q, q, POSITIONS, layer=0, scale=1.0))


def test_names_of_weights_do_not_collide():
    taken = weight("a.w.folded", 8)
    shifted = emit("add", weight("a.w", 8), constant(1.0))
    doubled = emit("mul", weight("a.w", 8), constant(2.0))
    y = emit("add", emit("mul", X, taken), emit("add", emit("mul", X, shifted), doubled))
    after = pass_by_name("fold_weights").apply(Graph("g", {"y": y}))
    assert list(after.weights) == ["a.w.folded.2", "a.w.folded.3"]


def test_weights_of_weights_are_made_of_checkpoint_tensors():
    stored = weight("made", 8)
    graph = Graph(
        "g",
        {"y": emit("mul", X, emit("add", stored, constant(1.0)))},
        weights={"made": emit("mul", weight("raw", 8), constant(3.0))},
    )
    after = pass_by_name("fold_weights").apply(graph)
    (name,) = after.weights
    x = np.ones((2, 8), np.float32)
    raw = {"raw": np.arange(8, dtype=np.float32)}
    result = evaluate(after, {"x": x}, raw.__getitem__)["y"]
    np.testing.assert_allclose(result, np.tile(raw["raw"] * 3 + 1, (2, 1)))
    assert name == "raw.folded"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["l.0.attn.q_proj.weight", "l.0.attn.k_proj.weight"], "l.0.attn.qk.weight"),
        (["l.3.mlp.gate_proj.weight", "l.3.mlp.up_proj.weight"], "l.3.mlp.gate_up.weight"),
        (
            ["a.q_a_proj.weight", "a.kv_a_proj_with_mqa.weight"],
            "a.q_a_proj_kv_a_proj_with_mqa.weight",
        ),
        ([f"m.experts.{i}.w1.weight" for i in range(8)], "m.experts.0_to_7.w1.weight"),
        (
            [f"m.experts.{i}.{w}_proj.weight" for i in range(8) for w in ("gate", "up")],
            "m.experts.0_to_7.gate_up.weight",
        ),
        (["q", "k", "v"], "qkv"),
    ],
)
def test_readable_names(names, expected):
    from bessemer.passes.fold_weights import derived_name

    assert derived_name(emit("concat", *[weight(n, 4) for n in names], axis=-1)) == expected
