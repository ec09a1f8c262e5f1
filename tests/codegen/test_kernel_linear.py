"""linear and glu_linear against NumPy: odd sizes, storage formats, epilogues, splits, lanes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bessemer.artifact import packing
from bessemer.artifact.layout import StoredWeight
from bessemer.codegen.group import ROWS, CodegenTarget, GroupSpec, Operand
from bessemer.codegen.kernels import linear as _linear  # noqa: F401
from bessemer.codegen.kernels.linear_parts import depth_parts
from bessemer.codegen.kernels.tile import tile_shape
from bessemer.graph import DType, Env, TensorType, evaluate_node
from bessemer.graph.ops.elementwise import ACTIVATIONS
from bessemer.graph.ops.fused import gated
from bessemer.graph.schema import build, param
from tests.codegen.integer_reference import grouped
from tests.codegen.kernel_harness import CompiledKernel, codegen_target

FORMATS = ("f32", "f16", "bf16", "q8_0")


def store(w: np.ndarray, dtype: str = "f32") -> tuple[np.ndarray, np.ndarray]:
    """(panels as an artifact stores them, the float32 values that those are)."""
    weight = StoredWeight.place("w", w.shape, dtype, "panels", 0)
    data = np.concatenate(list(packing.pack(w, weight)))
    return data.view(packing.ELEMENTS[dtype]).reshape(weight.stored_shape), packing.unpack(
        data, weight
    )


def pack(w: np.ndarray) -> np.ndarray:
    """float32 panels."""
    return store(w)[0]


def linear_spec(
    k: int,
    n: int,
    dtype: str,
    rows: int | str = ROWS,
    stride: int | None = None,
    kind: str = "linear",
    **attrs: object,
) -> GroupSpec:
    full = {
        "activation": "none",
        "scale": 1.0,
        "has_bias": False,
        "has_residual": False,
        "few_rows": False,
    }
    if kind == "glu_linear":
        full = {
            "activation": "silu",
            "alpha": 1.702,
            "limit": 7.0,
            "has_bias": False,
            "has_residual": False,
            "few_rows": False,
        }
    full.update(attrs)
    lead = (2,) if kind == "glu_linear" else ()
    stored = StoredWeight.place("w", (*lead, n, k), dtype, "panels", 0).stored_shape
    operands = [Operand("f32", (rows, k), (stride or k, 1))]
    if dtype == "q8_0" and rows == ROWS:
        padded = -(-k // 32) * 32
        operands = [Operand("i16", (rows, padded)), Operand("f32", (rows, padded // 32))]
    operands.append(Operand(dtype, stored, None, "weight"))
    if full["has_bias"]:
        operands.append(Operand("f32", (*lead, n), None, "weight"))
    if full["has_residual"]:
        operands.append(Operand("f32", (rows, n)))
    operands.append(Operand("f32", (rows, n), None, "out"))
    return GroupSpec(kind, tuple(operands), (), tuple(full.items()))


def random(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def activations(
    x: np.ndarray, spec: GroupSpec, target: CodegenTarget | None = None
) -> list[np.ndarray]:
    """x as the group takes it: itself, or integers and their scales."""
    if spec.operands[0].element != "i16":
        return [x]
    return list(grouped(x, tile_shape(target or codegen_target()).rows))


@pytest.mark.parametrize("lanes", [8, 4])
@pytest.mark.parametrize(
    ("k", "n", "dtype"),
    [
        *((1, 1, "f32"), (17, 33, "f16"), (40, 96, "bf16"), (9, 290, "f16")),
        *((7, 40, "q8_0"), (320, 33, "q8_0"), (700, 290, "f16"), (1290, 33, "f32")),
    ],
)
def test_linear_sizes(k: int, n: int, dtype: str, lanes: int) -> None:
    target = codegen_target(lanes)
    tiled = CompiledKernel(linear_spec(k, n, dtype), target)
    single = CompiledKernel(linear_spec(k, n, dtype, rows=1), target)
    stored, w = store(random((n, k), 1), dtype)
    # Each of K sums, as large as the root of K, is rounded to 2^-24 of itself; integer rows are
    # exact to 2^-15 of a block's largest number.
    tolerance = 2e-5 + 2**-24 * k if dtype != "q8_0" else 2**-15 * 4 * np.sqrt(k)
    for rows in (1, 2, 5, 6, 7, 33, 64):
        x = random((rows, k), rows)
        want = x.astype(np.float64) @ w.T.astype(np.float64)
        kernels = [tiled, single] if rows == 1 else [tiled]
        for kernel in kernels:
            for threads in (1, 2, 3):
                out = np.full((rows, n), np.nan, np.float32)
                given = activations(x, kernel.spec, target)
                kernel(rows, [*given, stored, out], threads=threads, order="reversed")
                np.testing.assert_allclose(out, want, rtol=2e-5, atol=tolerance)


@pytest.mark.parametrize("lanes", [16, 8, 4])
@pytest.mark.parametrize("dtype", ["f32", "f16", "q8_0"])
def test_left_over_rows(dtype: str, lanes: int) -> None:
    """Rows that don't fill a tile have a lower one of their own: the same bits as in a full one."""
    k, n = 37, 70
    target = codegen_target(lanes, registers=32 if lanes == 16 else 16)
    kernel = CompiledKernel(linear_spec(k, n, dtype), target)
    stored, _ = store(random((n, k), 1), dtype)
    full = 4 * tile_shape(target).rows
    x = random((full, k), 2)
    want = np.full((full, n), np.nan, np.float32)
    kernel(full, [*activations(x, kernel.spec, target), stored, want])
    for rows in range(1, full):
        out = np.full((rows + 1, n), np.nan, np.float32)
        given = activations(x[:rows].copy(), kernel.spec, target)
        kernel(rows, [*given, stored, out[:rows]], threads=2)
        assert np.array_equal(out[:rows], want[:rows]), rows
        assert np.isnan(out[rows]).all()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_widened_or_read_in_place(dtype: str) -> None:
    """The same sums in the same order, whether a load widens or a panel is widened before."""
    k, n, rows = 650, 300, 50
    stored, _ = store(random((n, k), 1), dtype)
    x, found = random((rows, k), 2), []
    for loads_halves in (False, True):
        target = replace(codegen_target(), loads_halves=loads_halves)
        out = np.full((rows, n), np.nan, np.float32)
        CompiledKernel(linear_spec(k, n, dtype), target)(rows, [x, stored, out], threads=2)
        found.append(out)
    assert np.array_equal(*found)


@pytest.mark.parametrize("rows", [ROWS, 1])
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_epilogue(activation: str, rows: int | str) -> None:
    """residual + scale * act(x @ w.T + bias), in whole vectors and in the tail of a panel."""
    k, n, count = 19, 45, 1 if rows == 1 else 9
    attrs = {"activation": activation, "scale": 0.5, "has_bias": True, "has_residual": True}
    kernel = CompiledKernel(linear_spec(k, n, "f32", rows, **attrs), codegen_target())
    x, w, bias, residual = (
        random(s, i) for i, s in enumerate([(count, k), (n, k), (n,), (count, n)])
    )
    out = np.full((count, n), np.nan, np.float32)
    kernel(count, [x, pack(w), bias, residual, out], threads=2)
    want = residual + np.float32(0.5) * ACTIVATIONS[activation](x @ w.T + bias)
    np.testing.assert_allclose(out, want, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("rows", [ROWS, 1])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_gated(activation: str, rows: int | str) -> None:
    k, n, count = 300, 40, 1 if rows == 1 else 13
    attrs = {"activation": activation, "has_bias": True, "limit": 1.5}
    spec = linear_spec(k, n, "f16", rows, kind="glu_linear", **attrs)
    kernel = CompiledKernel(spec, codegen_target())
    x, bias = random((count, k), 1), random((2, n), 2)
    stored, w = store(random((2, n, k), 3) * np.float32(0.2), "f16")
    out = np.full((count, n), np.nan, np.float32)
    kernel(count, [x, stored, bias, out], threads=2)
    gate, up = x @ w[0].T + bias[0], x @ w[1].T + bias[1]
    want = gated(gate, up, {"activation": activation, "alpha": 1.702, "limit": 1.5})
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_one_row_in_parts_of_the_depth(dtype: str) -> None:
    """Partial sums, then the epilogue; the same bits for any number of threads."""
    k, n = 2048, 41
    assert depth_parts(2, k) == 4
    assert depth_parts(1, 16384) == 32
    assert depth_parts(9, 16384) == depth_parts(1, 1000) == depth_parts(1, 2050) == 1
    stored, w = store(random((n, k), 1), dtype)
    whole = linear_spec(k, n, dtype, 1, has_bias=True, has_residual=True, activation="silu")
    x_operand, w_operand, *rest = whole.operands
    partials = Operand("f32", (2 * 4, 32), None, "out")
    cut = GroupSpec("linear_parts", (x_operand, w_operand, partials), (), (("parts", 4),))
    attrs = (*whole.attrs, ("parts", 4))
    combine = GroupSpec("linear_combine", (replace(partials, role="in"), *rest), (), attrs)
    x, bias, residual = random((1, k), 2), random((n,), 3), random((1, n), 4)
    given = x.astype(np.float64) @ w.T.astype(np.float64) + bias
    want = residual + given / (1 + np.exp(-given))
    for lanes in (8, 4):
        found = []
        for threads in (1, 3):
            sums = np.full((8, 32), np.nan, np.float32)
            out = np.full((1, n), np.nan, np.float32)
            target = codegen_target(lanes)
            CompiledKernel(cut, target)(1, [x, stored, sums], threads=threads, order="reversed")
            CompiledKernel(combine, target)(1, [sums, bias, residual, out])
            np.testing.assert_allclose(out, want, rtol=2e-5, atol=1e-4)
            found.append(out)
        assert np.array_equal(*found)


def test_rows_with_a_stride() -> None:
    """x may be a slice of wider rows; what lies beside it is not read."""
    k, n, rows = 24, 32, 7
    kernel = CompiledKernel(linear_spec(k, n, "f32", stride=50), codegen_target())
    wide = np.full((rows, 50), np.nan, np.float32)
    x = wide[:, :k]
    x[:] = random((rows, k), 0)
    w, out = random((n, k), 1), np.zeros((rows, n), np.float32)
    kernel(rows, [x, pack(w), out])
    np.testing.assert_allclose(out, x @ w.T, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", FORMATS)
def test_small_integers_are_exact(dtype: str) -> None:
    """C05, C07: sums of small integers have the same bits whatever the order; K past one block."""
    k, n, rows = 515, 65, 11
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (rows, k)).astype(np.float32)
    exact = rng.integers(-4, 5, (n, k)).astype(np.float32)
    stored, w = store(exact, dtype)
    assert np.array_equal(w, exact)
    want = (x.astype(np.int64) @ w.T.astype(np.int64)).astype(np.float32)
    for kernel, given in ((linear_spec(k, n, dtype), x), (linear_spec(k, n, dtype, 1), x[:1])):
        out = np.full((len(given), n), np.nan, np.float32)
        operands = [*activations(given, kernel), stored, out]
        CompiledKernel(kernel, codegen_target())(len(given), operands, threads=3)
        assert np.array_equal(out, want[: len(given)])


def test_long_sum_of_ones() -> None:
    """C07: f16 weights, K = 4096 of ones: 4096.0, which an f16 sum would not reach exactly."""
    k = 4096
    kernel = CompiledKernel(linear_spec(k, 32, "f16"), codegen_target())
    out = np.zeros((2, 32), np.float32)
    kernel(2, [np.ones((2, k), np.float32), store(np.ones((32, k), np.float32), "f16")[0], out])
    assert (out == 4096.0).all()


def test_accumulation_into_the_residual() -> None:
    """C05: C = 1, A @ B = 2 gives 3 everywhere, tails included."""
    for k, n in ((1, 1), (3, 15), (16, 17), (33, 33)):
        spec = linear_spec(k, n, "f32", has_residual=True)
        kernel = CompiledKernel(spec, codegen_target())
        for rows in (1, 3, 15, 16, 17, 33):
            x, w = np.full((rows, k), 2.0 / k, np.float32), np.ones((n, k), np.float32)
            out = np.zeros((rows, n), np.float32)
            kernel(rows, [x, pack(w), np.ones((rows, n), np.float32), out])
            np.testing.assert_allclose(out, 3.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
@pytest.mark.parametrize("kind", ["linear", "glu_linear"])
def test_few_rows(kind: str, dtype: str) -> None:
    """The rows whose logits are wanted: none, one (a matrix-vector product), several."""
    k, n = 70, 41
    lead = (2,) if kind == "glu_linear" else ()
    spec = linear_spec(k, n, dtype, kind=kind, few_rows=True)
    kernel = CompiledKernel(spec, codegen_target())
    stored, w = store(random((*lead, n, k), 1), dtype)
    for rows in (0, 1, 2, 7):
        x = random((7, k), rows)
        out = np.full((7, n), 7.0, np.float32)
        kernel(rows, [*activations(x, spec), stored, out], threads=2)
        want = x @ w.T if kind == "linear" else None
        if want is None:
            want = gated(x @ w[0].T, x @ w[1].T, dict(spec.attrs))
        np.testing.assert_allclose(out[:rows], want[:rows], rtol=2e-3, atol=2e-3)
        assert (out[rows:] == 7.0).all()


def test_no_rows() -> None:
    """A chunk whose logits nobody wants: nothing is read or written."""
    kernel = CompiledKernel(linear_spec(16, 32, "f32"), codegen_target())
    out = np.full((4, 32), 7.0, np.float32)
    kernel(0, [np.zeros((4, 16), np.float32), pack(np.ones((32, 16), np.float32)), out])
    assert (out == 7.0).all()


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("width", [1, 7, 40, 576])
def test_norms(op: str, width: int) -> None:
    rows, heads = 5, 3
    weights = 1 if op == "rms_norm" else 2
    for inner in ((), (heads,)):
        shape: tuple[int | str, ...] = (ROWS, *inner, width)
        operands = [Operand("f32", shape)]
        operands += [Operand("f32", (width,), None, "weight")] * weights
        operands.append(Operand("f32", shape, None, "out"))
        spec = GroupSpec(op, tuple(operands), (), (("eps", 1e-5),))
        x = random((rows, *inner, width), 0) * 3
        wb = [random((width,), i + 1) for i in range(weights)]
        out = np.full_like(x, np.nan)
        CompiledKernel(spec, codegen_target())(rows, [x, *wb, out], threads=2, order="reversed")
        given = [param("x", TensorType(DType.F32, x.shape))]
        given += [param("w", TensorType(DType.F32, (width,)))] * weights
        (want,) = evaluate_node(build(op, given, eps=1e-5), [x, *wb], Env())
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


def test_norm_of_large_values() -> None:
    """N02: a row of 300.0 with weight 1 gives 1.0; the squares would overflow f16."""
    shape = (ROWS, 64)
    operands = (Operand("f32", shape), Operand("f32", (64,)), Operand("f32", shape, None, "out"))
    spec = GroupSpec("rms_norm", operands, (), (("eps", 1e-6),))
    out = np.zeros((2, 64), np.float32)
    kernel = CompiledKernel(spec, codegen_target())
    kernel(2, [np.full((2, 64), 300.0, np.float32), np.ones(64, np.float32), out])
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", FORMATS)
def test_embedding_and_row_selection(dtype: str) -> None:
    vocab, width = 70, 21
    stored, table = store(random((vocab, width), 0), dtype)
    operands = (
        Operand(dtype, stored.shape, None, "weight"),
        Operand("i64", (ROWS,)),
        Operand("f32", (ROWS, width), None, "out"),
    )
    ids = np.array([0, 69, 31, 32, 33, 5, 0], np.int64)
    out = np.full((len(ids), width), np.nan, np.float32)
    kernel = CompiledKernel(GroupSpec("embedding", operands), codegen_target())
    kernel(len(ids), [stored, ids, out], threads=3)
    assert np.array_equal(out, table[ids])
    picks = np.array([6, 2], np.int64)
    chosen = np.zeros((2, width), np.float32)
    select = (Operand("f32", (ROWS, width)), Operand("i64", (ROWS,)), operands[2])
    CompiledKernel(GroupSpec("select_rows", select), codegen_target())(2, [out, picks, chosen])
    assert np.array_equal(chosen, table[ids][picks])
