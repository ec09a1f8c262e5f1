"""Hyper-connections in NumPy, against the equations."""

import numpy as np
import pytest

from bessemer.graph import Env, GraphError, build, constant, evaluate_node


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(op, *arrays, **attrs):
    node = build(op, [constant(a) for a in arrays], **attrs)
    return evaluate_node(node, list(arrays), Env())[0]


def test_sinkhorn_goes_to_a_doubly_stochastic_matrix():
    x = np.exp(floats(5, 4, 4))
    one = x / (x.sum(-2, keepdims=True) + np.float32(0.25))
    np.testing.assert_allclose(run("sinkhorn", x, iterations=1, eps=0.25), one, rtol=1e-6)
    two = one / (one.sum(-1, keepdims=True) + 0.25)
    two = two / (two.sum(-2, keepdims=True) + 0.25)
    np.testing.assert_allclose(run("sinkhorn", x, iterations=2, eps=0.25), two, rtol=1e-5)
    near = run("sinkhorn", x, iterations=20, eps=1e-6)
    np.testing.assert_allclose(near.sum(-1), 1, atol=1e-3)
    np.testing.assert_allclose(near.sum(-2), 1, atol=1e-3)


def test_streams_are_collapsed_and_mixed():
    x, y, pre = floats(5, 3, 7), floats(5, 7, seed=1), floats(5, 3, seed=2)
    post, comb = floats(5, 3, seed=3), floats(5, 3, 3, seed=4)
    collapsed = np.array([sum(pre[t, n] * x[t, n] for n in range(3)) for t in range(5)])
    np.testing.assert_allclose(run("collapse_streams", x, pre), collapsed, rtol=1e-5, atol=1e-6)
    mixed = run("mix_streams", x, y, post, comb)
    for t in range(5):
        for n in range(3):
            want = post[t, n] * y[t] + sum(comb[t, j, n] * x[t, j] for j in range(3))
            np.testing.assert_allclose(mixed[t, n], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "shapes", "attrs"),
    [
        ("sinkhorn", [(5, 4, 3)], {"iterations": 2, "eps": 0.0}),
        ("sinkhorn", [(5, 4, 4)], {"iterations": 0, "eps": 0.0}),
        ("collapse_streams", [(5, 4, 3), (5, 3)], {}),
        ("mix_streams", [(5, 4, 3), (5, 4), (5, 4), (5, 4, 4)], {}),
        ("mix_streams", [(5, 4, 3), (5, 3), (5, 4), (5, 4, 3)], {}),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(op, shapes, attrs):
    with pytest.raises(GraphError):
        build(op, [constant(np.zeros(s, np.float32)) for s in shapes], **attrs)
