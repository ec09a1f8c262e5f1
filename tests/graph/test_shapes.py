"""Shape rules with symbolic sizes: results, and refusals."""

import pytest

from bessemer.graph import Dim, DType, GraphError, TensorType, build, emit

T = Dim.sym("T")
F32, I64, BOOL = DType.F32, DType.I64, DType.BOOL


def value(*shape, dtype=F32):
    return emit("input", name=f"x{len(shape)}", dtype=dtype, shape=shape)


def shape_of(op, *operands, **attrs):
    return build(op, operands, **attrs).types[0].shape


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "shape"),
    [
        ("add", [value(T, 1, 4), value(3, 1)], {}, (T, 3, 4)),
        ("add", [value(1, 4), value(T, 4)], {}, (T, 4)),
        ("where", [value(T, 1, dtype=BOOL), value(4), value()], {}, (T, 4)),
        ("reshape", [value(T, 6)], {"shape": (T, 2, 3)}, (T, 2, 3)),
        ("reshape", [value(2 * T + 4, 3)], {"shape": (T + 2, 6)}, (T + 2, 6)),
        ("permute", [value(T, 2, 3)], {"perm": (2, 0, 1)}, (3, T, 2)),
        ("expand", [value(1, 3)], {"shape": (T, 2, 3)}, (T, 2, 3)),
        ("slice", [value(T, 7)], {"axis": -1, "start": 1, "stop": 6, "step": 2}, (T, 3)),
        ("slice", [value(T + 4)], {"axis": -1, "start": 2, "stop": T + 4}, (T + 2,)),
        ("concat", [value(T, 2), value(3, 2), value(T, 2)], {"axis": -2}, (2 * T + 3, 2)),
        ("pad", [value(T, 2)], {"low": (0, 1), "high": (3, 0)}, (T + 3, 3)),
        ("iota", [], {"size": T + 1}, (T + 1,)),
        ("take", [value(9, 4), value(T, 2, dtype=I64)], {"axis": -2}, (T, 2, 4)),
        ("gather", [value(T, 9), value(T, 2, dtype=I64)], {"axis": -1}, (T, 2)),
        ("reduce_sum", [value(T, 2, 3)], {"axes": (-2,)}, (T, 3)),
        ("reduce_mean", [value(T, 2, 3)], {"axes": (-1, -2), "keepdims": True}, (T, 1, 1)),
        ("matmul", [value(2, T, 5), value(1, 5, 3)], {}, (2, T, 3)),
        ("matmul", [value(T, 5), value(3, 5)], {"transpose_b": True}, (T, 3)),
        ("linear", [value(1, T, 5), value(3, 5)], {}, (1, T, 3)),
        ("glu_linear", [value(T, 5), value(2, 3, 5)], {}, (T, 3)),
        ("embedding", [value(9, 4), value(1, T, dtype=I64)], {}, (1, T, 4)),
        ("select_rows", [value(T, 2, 4), value(5, dtype=I64)], {"axis": -3}, (5, 2, 4)),
        ("topk", [value(T, 9)], {"k": 2}, (T, 2)),
    ],
)
def test_results(op, operands, attrs, shape):
    assert shape_of(op, *operands, **attrs) == shape


def heads(count, width=4):
    return value(T, count, width)


POSITIONS = emit("input", name="positions", dtype=I64, shape=(T,))


@pytest.mark.parametrize(
    ("op", "operands", "attrs", "message"),
    [
        ("add", [value(T), value(T + 1)], {}, "do not broadcast"),
        ("add", [value(T), value(T, dtype=I64)], {}, "types differ"),
        ("neg", [value(T), value(T)], {}, "takes 1 to 1 operands, not 2"),
        ("where", [value(T), value(T), value(T)], {}, "needs a bool"),
        ("reshape", [value(T, 6)], {"shape": (T, 5)}, "changes the number"),
        ("reshape", [value(T)], {"shape": (T, T)}, "not a linear size"),
        ("permute", [value(2, 3)], {"perm": (0, 0)}, "not a permutation"),
        ("expand", [value(2, 3)], {"shape": (2, 6)}, "broadcast"),
        ("slice", [value(7)], {"axis": -1, "start": 3, "stop": 8}, "slice 3:8"),
        ("slice", [value(T)], {"axis": -1, "start": 0, "stop": T, "step": 2}, "step 1"),
        ("slice", [value(7)], {"axis": 0, "start": 0, "stop": 1}, "axis 0 must be in"),
        ("slice", [value(7)], {"axis": -1, "start": 0}, "needs the attribute stop"),
        ("concat", [value(T, 2), value(T, 3)], {"axis": -2}, "concat of"),
        ("concat", [value(T), value(T, dtype=I64)], {"axis": -1}, "concat of"),
        ("take", [value(T), value(2, dtype=I64)], {"axis": -2}, "axis -2"),
        ("gather", [value(T, 2), value(T, dtype=I64)], {"axis": -1}, "one rank"),
        ("scatter", [value(4), value(2, dtype=I64), value(3)], {"axis": -1}, "scatter"),
        ("put", [value(4, 2), value(3, dtype=I64), value(3, 1)], {"axis": -2}, "put"),
        ("pad", [value(4)], {"low": (0, 0), "high": (0,)}, "for each axis"),
        ("reduce_sum", [value(T)], {"axes": (-2,)}, "axis -2"),
        ("topk", [value(3)], {"k": 4}, "topk of 4 out of 3"),
        ("matmul", [value(T, 4), value(5, 3)], {}, "inner sizes 4 and 5"),
        ("matmul", [value(4), value(4, 3)], {}, "needs matrices"),
        ("embedding", [value(9, 4), value(T)], {}, "integer ids"),
        ("linear", [value(T, 4), value(3, 5)], {}, "weights are"),
        ("linear", [value(T, 4), value(3, 4)], {"activation": "twist"}, "unknown activation"),
        ("linear", [value(T, 4), value(3, 4), value(3)], {}, "more operands"),
        ("linear", [value(T, 4), value(3, 4), value(4)], {"has_bias": True}, "bias"),
        ("linear", [value(T, 4), value(3, 4), value(3)], {"has_residual": True}, "residual"),
        ("glu_linear", [value(T, 4), value(3, 4)], {}, r"\[2, N, K\]"),
        ("rms_norm", [value(T, 4), value(3)], {"eps": 1e-6}, "norm of"),
        ("rope", [heads(2), value(T, 3), value(T, 3)], {}, "rotates 6 of 4"),
        ("rope", [heads(2), value(T, 2), value(T, 1)], {}, "with tables"),
        ("rope", [heads(2), value(T, 2), value(T, 2)], {"style": "odd"}, "neither half"),
        ("select_rows", [value(T, 4), value(2)], {}, "select_rows"),
    ],
)
def test_refusals(op, operands, attrs, message):
    with pytest.raises(GraphError, match=message):
        build(op, operands, **attrs)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (heads(3), heads(2), heads(2), "not a multiple"),
        (heads(2, 5), heads(2), heads(2), "unequal widths"),
        (heads(2), heads(2), heads(1), "unequal widths or heads"),
        (value(5, 2, 4), heads(2), heads(2), "unequal rows"),
        (value(T, 4), heads(2), heads(2), "needs"),
    ],
)
def test_attention_refusals(q, k, v, message):
    with pytest.raises(GraphError, match=message):
        build("attention", [q, k, v, POSITIONS], layer=0, scale=1.0)


def test_attention_widths_may_differ():
    result = build("attention", [heads(4), heads(2), heads(2, 3), POSITIONS], layer=0, scale=1.0)
    assert result.types == (TensorType(F32, (T, 4, 3)),)


def test_expert_shapes():
    x, chosen = value(T, 6), value(T, 2, dtype=I64)
    up, down = value(3, 2, 7, 6), value(3, 6, 7)
    hidden = build("expert_linear", [x, chosen, up], gated=True, activation="silu").out
    assert hidden.shape == (T, 2, 7)
    assert shape_of("expert_linear", hidden, chosen, down) == (T, 2, 6)
    assert shape_of("moe", x, chosen, value(T, 2), up, down) == (T, 6)
    with pytest.raises(GraphError, match="weights are"):
        build("expert_linear", [x, chosen, up])
    with pytest.raises(GraphError, match="indices"):
        build("moe", [x, chosen, value(T, 3), up, down])
