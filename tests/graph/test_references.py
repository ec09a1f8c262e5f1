"""Each op's NumPy reference against torch, on odd sizes."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bessemer.graph import DType, Env, build, constant, evaluate_node, schema_of
from bessemer.graph.ops.elementwise import ACTIVATIONS, ARITHMETIC, COMPARE, LOGICAL, UNARY
from bessemer.graph.schema import SCHEMAS

# References compute in f32, like torch; sums of a few dozen terms differ by rounding only.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(op, *arrays, **attrs):
    """Results of one node whose operands are constants."""
    node = build(op, [constant(a) for a in arrays], **attrs)
    results = evaluate_node(node, list(map(np.asarray, arrays)), Env())
    for result, kind in zip(results, node.types, strict=True):
        assert result.shape == kind.shape
        assert result.dtype == kind.dtype.numpy
    return results if len(results) > 1 else results[0]


def close(actual, expected):
    expected = expected.numpy() if isinstance(expected, torch.Tensor) else expected
    np.testing.assert_allclose(actual, expected, **CLOSE)


TORCH_UNARY = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "softplus": F.softplus,
}
POSITIVE = {"log", "sqrt", "rsqrt", "log1p"}


@pytest.mark.parametrize("op", [o for o in UNARY if o != "logical_not"])
def test_unary(op):
    x = floats(3, 5) * 3
    if op in POSITIVE:
        x = np.abs(x) + np.float32(0.1)
    fn = TORCH_UNARY.get(op) or getattr(torch, op)
    close(run(op, x), fn(torch.from_numpy(x)))


@pytest.mark.parametrize("op", ["sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "softplus", "erf"])
def test_saturated_activations_are_finite(op):
    x = np.array([-1e4, -100, -0.0, 0.0, 100, 1e4], np.float32)
    result = run(op, x)
    assert np.isfinite(result).all()
    fn = TORCH_UNARY.get(op) or getattr(torch, op)
    close(result, fn(torch.from_numpy(x)))


@pytest.mark.parametrize("op", [*ARITHMETIC, *COMPARE])
def test_binary_with_broadcast(op):
    a, b = np.abs(floats(3, 1, 5)) + 0.5, np.abs(floats(4, 1, seed=1)) + 0.5
    a[0, 0, 0] = b[0, 0]
    names = {"floordiv": "floor_divide", "mod": "remainder", "pow": "pow"}
    fn = getattr(torch, names.get(op, op))
    close(run(op, a, b), fn(torch.from_numpy(a), torch.from_numpy(b)))


def test_division_and_remainder_of_negative_integers():
    a, b = np.array([7, -7, 7, -7]), np.array([3, 3, -3, -3])
    close(run("floordiv", a, b), torch.floor_divide(torch.from_numpy(a), torch.from_numpy(b)))
    close(run("mod", a, b), torch.remainder(torch.from_numpy(a), torch.from_numpy(b)))


def test_logic_and_choice():
    a, b = np.array([[True], [False]]), np.array([True, False, True])
    for op in LOGICAL:
        assert (run(op, a, b) == getattr(np, op)(a, b)).all()
    assert (run("logical_not", a) == ~a).all()
    x, y = floats(2, 3), floats(3, seed=1)
    assert (run("where", a, x, y) == np.where(a, x, y)).all()


@pytest.mark.parametrize("dtype", list(DType))
def test_cast(dtype):
    x = np.array([0.0, 1.0, -2.7, 3.2], np.float32)
    assert (run("cast", x, dtype=dtype) == x.astype(dtype.numpy)).all()


@pytest.mark.parametrize("axes", [(-1,), (-2,), (-3, -1), (-3, -2, -1)])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("op", ["sum", "mean", "amax", "amin"])
def test_reductions(op, axes, keepdims):
    x = floats(3, 5, 7)
    name = {"amax": "max", "amin": "min"}.get(op, op)
    expected = getattr(torch, op)(torch.from_numpy(x), dim=axes, keepdim=keepdims)
    close(run(f"reduce_{name}", x, axes=axes, keepdims=keepdims), expected)


def test_product_and_argmax():
    x = floats(3, 5)
    t = torch.from_numpy(x)
    close(run("reduce_prod", x, axes=(-1,)), t.prod(-1))
    close(run("argmax", x, axes=(-2,)), t.argmax(0))
    assert run("argmax", np.array([1.0, 3.0, 3.0], np.float32), axes=(-1,)) == 1


def test_softmax_and_scans():
    x = floats(3, 5, 7) * 10
    t = torch.from_numpy(x)
    close(run("softmax", x, axis=-2), t.softmax(1))
    close(run("cumsum", x, axis=-3), t.cumsum(0))
    masked = np.full((2, 3), -np.inf, np.float32)
    masked[0, 1] = 5
    assert (run("softmax", masked) == [[0, 1, 0], [0, 0, 0]]).all()


def test_topk_breaks_ties_by_index():
    values, indices = run("topk", np.array([[1, 3, 3, 2, 3]], np.float32), k=4)
    assert values.tolist() == [[3, 3, 3, 2]]
    assert indices.tolist() == [[1, 2, 4, 3]]


def test_views():
    x = floats(2, 3, 4)
    assert (run("reshape", x, shape=(6, 4)) == x.reshape(6, 4)).all()
    assert (run("permute", x, perm=(2, 0, 1)) == x.transpose(2, 0, 1)).all()
    assert run("expand", floats(3, 1), shape=(2, 3, 4)).shape == (2, 3, 4)
    assert (run("slice", x, axis=-1, start=1, stop=4, step=2) == x[..., 1:4:2]).all()
    assert (run("concat", x, x[:, :1], axis=-2) == np.concatenate([x, x[:, :1]], 1)).all()
    assert (run("iota", size=4, start=3, step=-1) == [3, 2, 1, 0]).all()
    padded = run("pad", x, low=(0, 1, 0), high=(1, 0, 2), value=7.0)
    assert (padded == np.pad(x, [(0, 1), (1, 0), (0, 2)], constant_values=7.0)).all()


def test_selections():
    x, t = floats(5, 4), torch.from_numpy(floats(5, 4))
    index = np.array([[0, 3], [2, 2]])
    assert (run("take", x, index, axis=-2) == x[index]).all()
    assert (run("take", x, index, axis=-1) == x[:, index]).all()
    near = np.array([[0, 3], [1, 1], [2, 0], [3, 3], [0, 0]])
    close(run("gather", x, near, axis=-1), t.gather(1, torch.from_numpy(near)))
    source = floats(5, 2, seed=3)
    for accumulate in (False, True):
        distinct = near if accumulate else np.array([[0, 3], [1, 2], [2, 0], [3, 1], [0, 1]])
        fn = t.scatter_add if accumulate else t.scatter
        expected = fn(1, torch.from_numpy(distinct), torch.from_numpy(source))
        close(run("scatter", x, distinct, source, axis=-1, accumulate=accumulate), expected)
    rows = np.array([4, 1])
    expected = t.index_copy(0, torch.from_numpy(rows), torch.from_numpy(floats(2, 4, seed=4)))
    close(run("put", x, rows, floats(2, 4, seed=4), axis=-2), expected)
    columns = t.index_add(1, torch.from_numpy(rows % 4), torch.from_numpy(floats(5, 2, seed=5)))
    close(run("put", x, rows % 4, floats(5, 2, seed=5), axis=-1, accumulate=True), columns)
    assert (run("select_rows", x, rows) == x[rows]).all()
    assert (run("embedding", x, index) == x[index]).all()


def test_products():
    a, b = floats(2, 3, 5), floats(2, 5, 4, seed=1)
    close(run("matmul", a, b), torch.from_numpy(a) @ torch.from_numpy(b))
    turned = np.ascontiguousarray(b.transpose(0, 2, 1))
    close(run("matmul", a, turned, transpose_b=True), a @ b)
    close(run("matmul", a, b[0]), a @ b[0])


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_linear_epilogue(activation):
    x, w, b, r = floats(3, 5), floats(7, 5, seed=1), floats(7, seed=2), floats(3, 7, seed=3)
    y = ACTIVATIONS[activation](x @ w.T + b)
    options = {"activation": activation, "scale": 0.5, "has_bias": True, "has_residual": True}
    close(run("linear", x, w, b, r, **options), r + np.float32(0.5) * y)
    close(run("linear", x, w), F.linear(torch.from_numpy(x), torch.from_numpy(w)))


def test_glu_linear():
    x, w, b = floats(3, 5), floats(2, 7, 5, seed=1), floats(2, 7, seed=2)
    gate, up = x @ w[0].T + b[0], x @ w[1].T + b[1]
    close(run("glu_linear", x, w, b, has_bias=True), F.silu(torch.from_numpy(gate)).numpy() * up)
    clamped = run("glu_linear", x, w, b, has_bias=True, activation="swiglu_clamped", limit=0.5)
    g, u = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)
    close(clamped, (u + 1) * g / (1 + np.exp(-1.702 * g)))
    plain = run("glu_linear", x, w, b, has_bias=True, activation="silu_clamped", limit=0.5)
    close(plain, u * g / (1 + np.exp(-g)))


def test_norms():
    x, w, b = floats(3, 5, 7), floats(7, seed=1), floats(7, seed=2)
    t, tw, tb = map(torch.from_numpy, (x, w, b))
    close(run("rms_norm", x, w, eps=1e-3), F.rms_norm(t, (7,), tw, 1e-3))
    close(run("rms_norm", x, eps=1e-3), F.rms_norm(t, (7,), None, 1e-3))
    close(run("layer_norm", x, w, b, eps=1e-3), F.layer_norm(t, (7,), tw, tb, 1e-3))
    close(run("layer_norm", x, w, eps=1e-3), F.layer_norm(t, (7,), tw, None, 1e-3))
    assert (run("rms_norm", np.full((1, 300), 300, np.float32), eps=1e-6) == 1).all()


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("width", [6, 8])
def test_rope_is_a_complex_product(style, width):
    x, angle = floats(5, 2, width), floats(5, 3, seed=1)
    cos, sin = np.cos(angle), np.sin(angle)
    pairs = x[..., :6]
    a, b = (
        (pairs[..., :3], pairs[..., 3:]) if style == "half" else (pairs[..., ::2], pairs[..., 1::2])
    )
    turned = (a + 1j * b) * (cos + 1j * sin)[:, None]
    order = (turned.real, turned.imag)
    expected = (
        np.concatenate(order, -1) if style == "half" else np.stack(order, -1).reshape(5, 2, 6)
    )
    close(run("rope", x, cos, sin, style=style), np.concatenate([expected, x[..., 6:]], -1))
    tail = np.concatenate([x[..., 6:], pairs], -1)  # the same elements, turned where they are
    turned_tail = np.concatenate([x[..., 6:], expected], -1)
    close(run("rope", tail, cos, sin, style=style, offset=width - 6), turned_tail)
    back = run("rope", turned_tail, cos, -sin, style=style, offset=width - 6)
    np.testing.assert_allclose(back, tail, rtol=1e-5, atol=1e-5)


ATTENTION = ["attention", "flash_attention", "gqa_decode_attention"]


def attention_by_torch(q, k, v, window=0, softcap=0.0, sinks=None, scale=0.3):
    q, k, v = (torch.from_numpy(a).transpose(0, 1) for a in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    at, key_at = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])[None]
    mask = key_at > at
    if window:
        mask |= key_at <= at - window
    scores = scores.masked_fill(mask, -torch.inf)
    if sinks is not None:
        extra = torch.from_numpy(sinks)[:, None, None].expand(-1, q.shape[1], 1)
        scores = torch.cat([scores, extra], -1)
    p = scores.softmax(-1)[..., : k.shape[1]]
    return (p @ v).transpose(0, 1)


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"softcap": 0.7}, {"sinks": True}])
def test_attention(op, options):
    q, k, v = floats(7, 6, 5) * 3, floats(7, 2, 5, seed=1) * 3, floats(7, 2, 3, seed=2)
    sinks = floats(6, seed=3) if options.get("sinks") else None
    attrs = {n: o for n, o in options.items() if n != "sinks"}
    extra = () if sinks is None else (sinks,)
    result = run(
        op, q, k, v, np.arange(7), *extra, layer=0, scale=0.3, has_sinks=sinks is not None, **attrs
    )
    close(result, attention_by_torch(q, k, v, sinks=sinks, **attrs))


@pytest.mark.parametrize("split", [1, 3, 6])
def test_attention_in_pieces_and_after_a_rewind(split):
    q, k, v = floats(7, 4, 5), floats(7, 2, 5, seed=1), floats(7, 2, 3, seed=2)
    whole = attention_by_torch(q, k, v, window=4)
    env = Env()

    def step(rows):
        at = np.arange(7)[rows]
        operands = [q[rows], k[rows], v[rows], at]
        node = build("attention", [constant(a) for a in operands], layer=3, scale=0.3, window=4)
        return evaluate_node(node, operands, env)[0]

    step(slice(0, 7))
    close(step(slice(split, 7)), whole[split:])
    close(step(slice(0, split)), whole[:split])
    close(step(slice(split, 7)), whole[split:])


def test_attention_row_without_keys_is_zero():
    q = k = v = floats(2, 1, 4)
    node = build("attention", [constant(a) for a in (q, k, v, np.arange(2))], layer=0, scale=1.0)
    from bessemer.graph.ops.fused import attend

    allowed = np.array([[False, False], [True, False]])
    result = attend(q, k, v, allowed, node.attrs)
    assert (result[0] == 0).all()
    close(result[1], v[0])


def experts_by_torch(x, indices, scores, gate_up, down, gb, db):
    result = np.zeros_like(x)
    for row in range(x.shape[0]):
        for expert, score in zip(indices[row], scores[row], strict=True):
            gate = x[row] @ gate_up[expert, 0].T + gb[expert, 0]
            up = x[row] @ gate_up[expert, 1].T + gb[expert, 1]
            hidden = F.silu(torch.from_numpy(gate)).numpy() * up
            result[row] += score * (hidden @ down[expert].T + db[expert])
    return result


def test_experts():
    x, gate_up, down = floats(5, 6), floats(3, 2, 7, 6, seed=1), floats(3, 6, 7, seed=2)
    gb, db, scores = floats(3, 2, 7, seed=3), floats(3, 6, seed=4), floats(5, 2, seed=5)
    indices = np.array([[0, 1], [2, 0], [1, 1], [2, 1], [0, 2]])
    expected = experts_by_torch(x, indices, scores, gate_up, down, gb, db)
    both = {"has_gate_up_bias": True, "has_down_bias": True}
    close(run("moe", x, indices, scores, gate_up, down, gb, db, **both), expected)
    plain = experts_by_torch(x, indices, scores, gate_up, down, 0 * gb, 0 * db)
    close(run("moe", x, indices, scores, gate_up, down), plain)
    hidden = run(
        "expert_linear", x, indices, gate_up, gb, gated=True, activation="silu", has_bias=True
    )
    each = run("expert_linear", hidden, indices, down, db, has_bias=True)
    close(np.sum(each * scores[..., None], -2), expected)


def test_state_starts_at_zero_and_is_kept():
    env = Env()
    node = build("state", name="s", dtype=DType.F32, shape=(2,))
    assert (evaluate_node(node, [], env)[0] == 0).all()
    env.states["s"] = np.ones(2, np.float32)
    assert (evaluate_node(node, [], env)[0] == 1).all()


def test_every_op_is_exercised():
    """Here, or in the file of its family."""
    families = ("test_references", "test_compressed", "test_rounding", "test_streams")
    files = [Path(__file__).with_name(f"{name}.py") for name in families]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    elementwise = {*UNARY, *ARITHMETIC, *COMPARE, *LOGICAL}
    leaves = {"input", "param", "constant"}
    reductions = {n for n in SCHEMAS if n.startswith("reduce_")}
    missing = [
        n for n in SCHEMAS if n not in elementwise | leaves | reductions and f'"{n}"' not in text
    ]
    assert missing == []
    assert all(schema_of(n).name == n for n in SCHEMAS)
