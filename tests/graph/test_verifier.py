"""The verifier refuses graphs that are not well formed, and says where."""

from dataclasses import replace

import numpy as np
import pytest

from bessemer.graph import (
    Dim,
    DType,
    Graph,
    GraphError,
    TensorType,
    Value,
    constant,
    emit,
    param,
    verify,
)
from bessemer.graph.core import Node

T = Dim.sym("T")
F32 = DType.F32


def rows(name="x", width=4):
    return emit("input", name=name, dtype=F32, shape=(T, width))


def test_a_good_graph_passes():
    verify(Graph("g", {"y": emit("neg", rows())}))


def test_no_outputs():
    with pytest.raises(GraphError, match="@empty has no outputs"):
        verify(Graph("empty", {}))


def test_a_wrong_type_is_named_with_its_origin():
    good = emit("neg", rows(), loc="model.mlp (m.py:7)").node
    bad = replace(good, types=(TensorType(F32, (T, 5)),))
    with pytest.raises(GraphError, match=r"neg \(model\.mlp \(m\.py:7\)\) is typed"):
        verify(Graph("g", {"y": bad.out}))


def test_an_unknown_op_or_attribute():
    x = rows()
    with pytest.raises(GraphError, match="unknown op 'twist'"):
        verify(Graph("g", {"y": Node("twist", (x,), {}, (x.type,)).out}))
    with pytest.raises(GraphError, match="neg has no attribute speed"):
        verify(Graph("g", {"y": Node("neg", (x,), {"speed": 1}, (x.type,)).out}))


def test_a_missing_result():
    x = rows()
    node = Node("neg", (Value(x.node, 0),), {}, (x.type,))
    beyond = Node("neg", (Value(node, 1),), {}, (x.type,))
    with pytest.raises((GraphError, IndexError)):
        verify(Graph("g", {"y": beyond.out}))


def test_one_name_with_two_types():
    both = emit("add", param("w", TensorType(F32, (4,))), emit("reduce_sum", rows(), axes=(-2,)))
    verify(Graph("g", {"y": both}))
    other = emit("concat", both, param("w", TensorType(F32, (2,))), axis=-1)
    with pytest.raises(GraphError, match="param 'w' has two types"):
        verify(Graph("g", {"y": other}))


def attention(layer: int, x: Value) -> Value:
    heads = emit("reshape", x, shape=(T, 1, 4))
    positions = emit("input", name="positions", dtype=DType.I64, shape=(T,))
    y = emit("attention", heads, heads, heads, positions, layer=layer, scale=1.0)
    return emit("reshape", y, shape=(T, 4))


def test_two_attentions_of_one_layer():
    verify(Graph("g", {"y": attention(1, attention(0, rows()))}))
    with pytest.raises(GraphError, match="KV cache of one layer"):
        verify(Graph("g", {"y": attention(0, attention(0, rows()))}))


def test_an_update_of_another_type():
    state = emit("state", name="s", dtype=F32, shape=(4,))
    total = emit("reduce_sum", state, axes=(-1,), keepdims=True)
    with pytest.raises(GraphError, match="update of state 's' has type"):
        verify(Graph("g", {"y": state}, {"s": total}))


def test_weights_may_not_depend_on_a_call():
    w = param("w", TensorType(F32, (4,)))
    fine = emit("mul", w, constant(2.0))
    verify(Graph("g", {"y": rows()}, weights={"v": fine}))
    with pytest.raises(GraphError, match="weight 'v' depends on input"):
        verify(Graph("g", {"y": rows()}, weights={"v": emit("mul", rows(), w)}))


def test_a_cycle_is_refused():
    x = rows()
    first = Node("neg", (x,), {}, (x.type,))
    second = Node("neg", (first.out,), {}, (x.type,))
    object.__setattr__(first, "inputs", (second.out,))
    with pytest.raises(ValueError, match="cycle"):
        verify(Graph("g", {"y": second.out}))


def test_rewrite_checks_the_number_of_results():
    graph = Graph("g", {"y": emit("neg", rows())})
    with pytest.raises(ValueError, match="replaced input by 2 values"):
        graph.rewrite(lambda n: (n.out, n.out) if n.op == "input" else None)


def test_rewrite_keeps_untouched_nodes():
    x = rows()
    y, z = emit("neg", x), emit("exp", x)
    graph = Graph("g", {"y": y, "z": z})
    after = graph.rewrite(lambda n: emit("abs", *n.inputs) if n.op == "neg" else None)
    assert after.outputs["z"] == z
    assert after.outputs["y"].op == "abs"
    assert graph.outputs["y"] == y


def test_constants_are_frozen_copies():
    source = np.ones(3, np.float32)
    array = constant(source).node.attrs["value"]
    source[0] = 5
    assert array[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2
