"""The machinery of passes: rewriting, substitution, use counts, patterns."""

import pytest

from bessemer.graph import Dim, DType, Graph, GraphError, build, constant, emit
from bessemer.passes import views
from bessemer.passes.base import rewrite, settle, substitute, use_counts
from bessemer.passes.pattern import match, mean, named, op, scalar, var

T = Dim.sym("T")
F32 = DType.F32


def rows(name="x", *shape):
    return emit("input", name=name, dtype=F32, shape=(T, *(shape or (4,))))


def test_a_rule_that_changes_nothing_gives_the_same_graph():
    graph = Graph("g", {"y": emit("neg", rows())})
    assert rewrite(graph, lambda node, uses: None) is graph


def test_a_rule_may_not_change_a_type():
    graph = Graph("g", {"y": emit("neg", rows())})
    with pytest.raises(GraphError, match="a rule turned"):
        rewrite(graph, lambda n, u: emit("neg", rows("z", 5)) if n.op == "neg" else None)


def test_what_a_rule_builds_inherits_the_location():
    graph = Graph("g", {"y": emit("neg", rows(), loc="model.a (a.py:1)")})
    after = rewrite(
        graph, lambda n, u: emit("abs", emit("exp", *n.inputs)) if n.op == "neg" else None
    )
    assert [n.loc for n in after.nodes()] == ["", "model.a (a.py:1)", "model.a (a.py:1)"]


def test_locations_do_not_spread_to_what_was_there():
    x = rows()
    shared = emit("exp", x)
    graph = Graph("g", {"y": emit("neg", shared, loc="here"), "z": emit("sin", shared)})
    after = rewrite(graph, lambda n, u: emit("abs", *n.inputs) if n.op == "neg" else None)
    assert after.outputs["y"].node.inputs == after.outputs["z"].node.inputs == (shared,)


def test_rewriting_replaces_each_result_of_a_node():
    values, indices = build("topk", [rows()], k=2).outputs
    graph = Graph("g", {"v": values, "i": indices})

    def rule(node, uses):
        return (
            build("topk", [emit("abs", *node.inputs)], k=2).outputs if node.op == "topk" else None
        )

    after = rewrite(graph, rule)
    assert [v.node.inputs[0].op for v in after.outputs.values()] == ["abs", "abs"]
    assert after.outputs["v"].node is after.outputs["i"].node


def test_use_counts_count_operands_outputs_and_updates():
    state = emit("state", name="s", dtype=F32, shape=(4,))
    y = emit("add", state, state)
    counts = use_counts(Graph("g", {"y": y, "z": y}, {"s": y}))
    assert counts[state] == 2
    assert counts[y] == 3


def test_uses_follow_values_through_the_rewriting():
    x = rows()
    y = emit("neg", x)
    graph = Graph("g", {"a": emit("exp", y), "b": emit("abs", y)})
    seen = {}

    def rule(node, uses):
        if node.op == "neg":
            return emit("sin", *node.inputs)
        if node.op in ("exp", "abs"):
            seen[node.op] = uses.count(node.inputs[0]), node.inputs[0].op
        return None

    rewrite(graph, rule)
    assert seen == {"exp": (2, "sin"), "abs": (2, "sin")}


def test_settling_applies_a_rule_until_it_has_nothing_to_do():
    y = rows()
    for _ in range(9):
        y = emit("neg", y)

    def rule(node, uses):
        if node.op == "neg" and node.inputs[0].op == "neg":
            return node.inputs[0].node.inputs[0]
        return None

    assert settle(Graph("g", {"y": y}), rule).op_counts() == {"input": 1, "neg": 1}


def test_a_rule_that_never_settles_is_an_error():
    graph = Graph("g", {"y": emit("neg", rows())})
    with pytest.raises(GraphError, match="turns did not settle"):
        settle(graph, lambda n, u: emit("neg", *n.inputs) if n.op == "neg" else None, "turns")


def test_substitution_follows_chains_and_rebuilds_users():
    x = rows()
    a, b = emit("neg", x), emit("abs", x)
    c = emit("exp", a)
    graph = Graph("g", {"y": emit("add", c, b)})
    after = substitute(graph, {a: b, c: emit("sin", a)})
    y = after.outputs["y"].node
    assert y.inputs[0].op == "sin"
    assert y.inputs[0].node.inputs == (b,)
    assert substitute(graph, {}) is graph


def test_substitution_may_not_change_a_type_of_a_result():
    y = emit("neg", rows())
    with pytest.raises(GraphError, match="can't be replaced"):
        substitute(Graph("g", {"y": y}), {y: rows("z", 5)})


def test_patterns_bind_values_and_numbers():
    x = rows()
    value = emit("mul", x, emit("add", constant(2.5), emit("neg", x)))
    found = match(var("x") * (op("neg", var("x")) + scalar("c")), value)
    assert found == {"x": x, "c": 2.5}
    assert match(var("x") * (op("neg", var("x")) + 2.4), value) is None


def test_a_repeated_variable_is_one_value():
    x, y = rows(), rows("y")
    assert match(var("a") - op("neg", var("a")), emit("sub", x, emit("neg", x)))
    assert match(var("a") - op("neg", var("a")), emit("sub", x, emit("neg", y))) is None


def test_only_commutative_ops_match_in_both_orders():
    x = rows()
    two = constant(2.0)
    assert match(2.0 * var("x"), emit("mul", x, two))
    assert match(2.0 / var("x"), emit("div", x, two)) is None
    assert match(1.0 - var("x"), emit("sub", constant(1.0), x))


def test_alternatives_are_tried_in_order_and_backtrack():
    x = rows()
    both = op("neg", var("x")) | op("abs", var("x"))
    assert match(both * both, emit("mul", emit("abs", x), emit("neg", x)))["x"] == x


def test_attributes_and_names():
    x = rows()
    kept = emit("reduce_mean", x, axes=(-1,), keepdims=True)
    assert match(named("m", mean(var("x"))), kept) == {"x": x, "m": kept}
    assert match(mean(var("x")), emit("reduce_mean", x, axes=(-1,))) is None


def test_literals_allow_for_f32_rounding_only():
    assert match(op("neg", 0.1), emit("neg", constant(0.1))) is not None
    assert match(op("neg", 0.1), emit("neg", constant(0.10001))) is None


def test_a_condition_on_a_variable():
    x = rows()
    vector = var("w", lambda v: len(v.shape) == 1)
    assert match(var("x") * vector, emit("mul", x, constant([1.0] * 4, "f4")))
    assert match(var("x") * vector, emit("mul", x, x)) is None


@pytest.mark.parametrize(
    ("before", "after", "groups"),
    [
        ((T, 8), (T, 2, 4), [([0], [0]), ([1], [1, 2])]),
        ((T, 2, 4), (T, 8), [([0], [0]), ([1, 2], [1])]),
        ((2, T, 4), (2, 1, T, 4), [([0], [0, 1]), ([1], [2]), ([2], [3])]),
        ((T, 4), (1, T, 4), [([0], [0, 1]), ([1], [2])]),
        ((6, 4), (4, 6), [([0, 1], [0, 1])]),
        ((2, 3, T), (3, 2, T), [([0, 1], [0, 1]), ([2], [2])]),
        ((2, T), (2 * T,), [([0, 1], [0])]),
    ],
)
def test_axes_that_a_reshape_maps_to_each_other(before, after, groups):
    assert views.reshape_groups(before, after) == groups


def test_builders_of_views_merge_chains():
    x = rows("x", 6)
    assert views.reshape(views.reshape(x, (T, 2, 3)), (T, 6)) == x
    turned = views.permute(views.reshape(x, (T, 2, 3)), (1, 2, 0))
    assert views.permute(turned, (2, 0, 1)).op == "reshape"
    inner = views.slice_last(views.slice_last(x, 1, 5), 1, 3)
    assert views.bounds(inner) == (2, 4)
    assert inner.node.inputs == (x,)
    assert views.slice_last(x, 0, 6) == x
