"""Printer and parser are inverses, for odd constants too."""

import numpy as np
import pytest

from bessemer.graph import (
    Dim,
    DType,
    Graph,
    GraphError,
    TensorType,
    build,
    constant,
    emit,
    param,
    parse_graph,
    print_graph,
)

T = Dim.sym("T")
F32 = DType.F32


def round_trip(graph: Graph) -> Graph:
    text = print_graph(graph)
    again = parse_graph(text)
    assert print_graph(again) == text
    return again


def constant_after(value: np.ndarray) -> np.ndarray:
    again = round_trip(Graph("g", {"y": constant(value)}))
    return again.outputs["y"].node.attrs["value"]


SPECIAL = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, 0.1, 1 / 3]


@pytest.mark.parametrize("value", SPECIAL)
def test_float_constants_keep_every_bit(value):
    array = np.array([value], np.float32)
    assert constant_after(array).tobytes() == array.tobytes()


def test_nan_stays_nan():
    after = constant_after(np.array([np.nan, 1.0], np.float32))
    assert np.isnan(after[0])
    assert after[1] == 1


def test_every_finite_f16_keeps_its_bits():
    array = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    array = array[np.isfinite(array)]
    after = constant_after(array)
    assert after.dtype == np.float16
    assert after.tobytes() == array.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0,), np.float32),
        np.zeros((2, 0, 3), np.float32),
        np.float32(2.5),
        np.array([[True, False]]),
        np.array([-(2**63), 2**63 - 1]),
        np.array([-(2**31), 2**31 - 1], np.int32),
        np.arange(6, dtype=np.float32).reshape(1, 2, 3),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_shapes_and_types_of_constants(array):
    after = constant_after(array)
    assert after.shape == np.shape(array)
    assert after.dtype == np.asarray(array).dtype
    assert after.tobytes() == np.asarray(array).tobytes()


def test_attributes_of_every_kind():
    x = emit("input", name="ids", dtype=DType.I64, shape=(1, 2 * T + 3))
    y = emit("slice", x, axis=-1, start=T + 1, stop=2 * T + 3)
    w = param('odd "name" \\ ü', TensorType(F32, (4, 8)))
    z = emit("pad", w, low=(0, 1), high=(2, 0), value=-np.inf)
    top = build("topk", [z], k=3)
    scaled = emit("linear", z, param("v", TensorType(F32, (3, 9))), scale=0.1, activation="silu")
    graph = Graph("g", {"a": y, "b": top.outputs[1], "c": scaled, "d": top.outputs[0]})
    again = round_trip(graph)
    assert [v.type for v in again.outputs.values()] == [v.type for v in graph.outputs.values()]
    assert again.outputs["c"].node.attrs["scale"] == 0.1
    assert again.outputs["c"].node.inputs[0].node.attrs["value"] == -np.inf


def test_updates_and_weights_with_dots():
    state = emit("state", name="layers.0.cache", dtype=F32, shape=(4,))
    one = param("layers.0.w", TensorType(F32, (4,)))
    stored = param("layers.0.w.shifted", TensorType(F32, (4,)))
    new = emit("add", state, stored)
    graph = Graph(
        "g",
        {"y": new},
        {"layers.0.cache": new},
        {"layers.0.w.shifted": emit("add", one, constant(1.0))},
    )
    again = round_trip(graph)
    assert list(again.updates) == ["layers.0.cache"]
    assert list(again.weights) == ["layers.0.w.shifted"]


def test_locations_are_comments():
    x = emit("input", name="x", dtype=F32, shape=(T,))
    graph = Graph("g", {"y": emit("neg", x, loc="model.layers.0 (a.py:3)")})
    text = print_graph(graph, locations=True)
    assert "// model.layers.0 (a.py:3)" in text
    assert print_graph(parse_graph(text)) == print_graph(graph)


def test_a_deep_graph_prints():
    x = emit("input", name="x", dtype=F32, shape=(T,))
    for _ in range(5000):
        x = emit("neg", x)
    assert len(round_trip(Graph("deep", {"y": x})).nodes()) == 5001


GOOD = """graph @g {
  %0 = input {name = "x", dtype = f32, shape = [T, 4]} : f32[T, 4]
  %1 = neg(%0) : f32[T, 4]
  output y = %1
}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("neg(%0) : f32[T, 4]", "neg(%0) : f32[T, 5]", "line 3: neg gives .*says"),
        ("neg(%0)", "neg(%7)", "line 3: %7 is used before it is defined"),
        ("neg(%0)", "sine(%0)", "unknown op 'sine'"),
        ("neg(%0)", "neg(%0) {deep = 1}", "neg has no attribute deep"),
        ("%1 = neg", "%0 = neg", "line 3: %0 is defined twice"),
        ("output y", "result y", "line 4: expected an op, found 'result'"),
        ("output y = %1", "output y = %9", "%9 is not defined"),
        ("%1 = neg", "%1, %2 = neg", "has 1 results, not 2"),
        ("neg(%0)", "neg(%0) ?", "line 3: can't read"),
        ("  output y", "  ?output y", "line 4: can't read '[?]output"),
        ("\n}", "", "found 'the end'"),
        ('{name = "x", ', "{", "input needs the attribute name"),
    ],
)
def test_bad_text_is_refused_with_its_line(old, new, message):
    assert old in GOOD
    parse_graph(GOOD)
    with pytest.raises(GraphError, match=message):
        parse_graph(GOOD.replace(old, new))
