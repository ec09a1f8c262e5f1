"""Norms, rotary embedding, and pieces of models by the generic lowering."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.codegen.payload import PayloadSpec, emit_payload
from bessemer.graph.core import Value
from bessemer.graph.dtypes import DType
from bessemer.graph.schema import build, constant, emit
from tests.codegen.payload_harness import Case, Library, Stored, T, tensor, weight

WIDTH = 19


def _slice(x: Value, start: int, stop: int) -> Value:
    return emit("slice", x, axis=-1, start=start, stop=stop)


def _norms() -> list[Case]:
    x, w, b = tensor("x", T, WIDTH), weight("w", WIDTH), weight("b", WIDTH)
    heads = tensor("x", T, 3, WIDTH)
    narrow = {"w": Stored("f16"), "b": Stored("bf16")}
    return [
        Case("rms_norm", [emit("rms_norm", x, w, eps=1e-5)]),
        Case("rms_norm_f16", [emit("rms_norm", x, w, eps=1e-5)], narrow),
        Case("rms_norm_bare", [emit("rms_norm", x, eps=0.5)]),
        Case("rms_norm_heads", [emit("rms_norm", heads, w, eps=1e-6)]),
        Case("rms_norm_rows_last", [emit("rms_norm", tensor("y", 5, T), eps=1e-5)]),
        Case("layer_norm", [emit("layer_norm", x, w, b, eps=1e-5)], narrow),
        Case("layer_norm_w", [emit("layer_norm", heads, w, eps=1e-5)]),
        Case("layer_norm_bare", [emit("layer_norm", x, eps=1e-5)]),
    ]


def _ropes() -> list[Case]:
    cases = []
    for style in ("half", "interleaved"):
        for heads, width, half in ((3, 8, 4), (2, 10, 3), (1, 2, 1)):
            x = tensor("x", T, heads, width)
            tables = tensor("cos", T, half), tensor("sin", T, half)
            rope = emit("rope", x, *tables, style=style)
            cases.append(Case(f"rope_{style}_{width}", [rope]))
        x = tensor("x", T, 2, 13)
        tables = tensor("cos", T, 3), tensor("sin", T, 3)
        for offset in (4, 7):
            rope = emit("rope", x, *tables, style=style, offset=offset)
            cases.append(Case(f"rope_{style}_from_{offset}", [rope]))
    return cases


def _streams() -> list[Case]:
    x, y = tensor("x", T, 4, WIDTH), tensor("y", T, WIDTH)
    post, comb = tensor("post", T, 4), tensor("comb", T, 4, 4)
    positive = emit("exp", comb)
    x64 = tensor("x", T, 3, 76)
    return [
        Case("sinkhorn", [emit("sinkhorn", positive, iterations=3, eps=1e-6)]),
        Case("collapse_streams", [emit("collapse_streams", x, post)]),
        Case("mix_streams", [emit("mix_streams", x, y, post, comb)]),
        Case("hadamard", [emit("hadamard", tensor("x", T, 16))]),
        Case("e4m3", [emit("round_trip", x64, format="e4m3", block=32, begin=8, end=72)]),
        Case("e2m1", [emit("round_trip", y, format="e2m1", block=19, begin=0, end=19)]),
        Case("e2m1_none", [emit("round_trip", y, format="e2m1", block=19, begin=3, end=3)]),
    ]


def _pieces() -> list[Case]:
    x, w = tensor("x", T, WIDTH), weight("w", WIDTH)
    added = emit("add", x, tensor("y", T, WIDTH))
    qkv = tensor("qkv", T, 40)
    q = emit("reshape", _slice(qkv, 0, 24), shape=(T, 3, 8))
    tables = [tensor("cos", T, 4), tensor("sin", T, 4)]
    normed = emit("rms_norm", q, weight("qw", 8), eps=1e-6)
    angle = emit("mul", emit("reshape", _f32(tensor("p", T, dtype=DType.I64)), shape=(T, 1)),
                 constant(np.float32(10.0) ** -np.arange(4, dtype=np.float32)))  # fmt: skip
    top, where = build("topk", [emit("sigmoid", x)], k=4).outputs
    share = emit("div", top, emit("reduce_sum", top, axes=(-1,), keepdims=True))
    capped = emit("mul", emit("tanh", emit("div", x, constant(30.0))), constant(30.0))
    strided = Case("strided", [emit("rope", emit("exp", tensor("h", T, 3, 8)), *tables)],
                   strides={"h": (40, 8, 1)})  # fmt: skip
    joined = emit("reshape", tensor("h", T, 3, 8), shape=(T, 24))
    merged = Case("strided_merge", [emit("neg", joined)],
                  strides={"h": (40, 8, 1)})  # fmt: skip
    return [
        Case("residual_norm", [added, emit("rms_norm", added, w, eps=1e-5)]),
        Case("norm_rope", [emit("rope", normed, *tables)]),
        Case("angles", [emit("cos", angle), emit("sin", angle)]),
        Case("router", [share, where]),
        Case("softcap", [capped]),
        Case("gemma_residual", [emit("add", x, emit("rms_norm", added, w, eps=1e-6))]),
        strided,
        merged,
    ]


def _f32(x: Value) -> Value:
    return emit("cast", x, dtype=DType.F32)


CASES = _norms() + _ropes() + _streams() + _pieces()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(CASES, tmp_path_factory.mktemp("fused"))


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_random_values(library: Library, name: str) -> None:
    for rows in (1, 2, 5, 33):
        library.check(name, rows, library.cases[name].data(rows, rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms_of_large_and_tiny_rows(library: Library, name: str) -> None:
    data = library.cases[name].data(4)
    data["x"] *= np.array([1e8, 1e-8, 0.0, 1.0], np.float32)[:, None]
    library.check(name, 4, data, rtol=1e-5, atol=1e-6)


def test_nan_stays_in_its_row(library: Library) -> None:
    for name in ("rms_norm", "softcap", "router"):
        data = library.cases[name].data(3)
        clean = library.run(name, data, 3, "rows")
        data["x"][1] = np.nan
        dirty = library.run(name, data, 3, "rows")
        for a, b in zip(clean, dirty, strict=True):
            assert a[[0, 2]].tobytes() == b[[0, 2]].tobytes(), name


def test_a_norm_reads_its_row_twice(library: Library) -> None:
    text = library.groups["rms_norm", "rows"].text
    assert text.count("linalg.generic") == 3  # sum of squares, factor, product
    assert library.groups["rms_norm", "rows"].thread_scratch_bytes == 0


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_the_payload_stands_for_itself(library: Library, name: str) -> None:
    import mlir.ir as ir
    from mlir.passmanager import PassManager

    from bessemer.backend.pipeline import BUFFERIZE, LOOPS, pipeline_text

    text = library.groups[name, "whole"].payload
    assert text == emit_payload(f"{name}_whole", library.cases[name].spec)
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        assert module.operation.verify()
        PassManager.parse(pipeline_text(BUFFERIZE + LOOPS)).run(module.operation)
        assert "tensor<" not in str(module)


def test_payload_of_a_single_value() -> None:
    y = emit("add", tensor("x", T, 2), constant(1.5))
    spec = PayloadSpec((y.node,), (y.node.inputs[0],), (y,))
    text = emit_payload("shift", spec)
    head = "func.func @shift(%in0: tensor<?x2xf32>, %out0: tensor<?x2xf32>) -> (tensor<?x2xf32>)"
    assert head in text
    assert "// add f32[T, 2]" in text
