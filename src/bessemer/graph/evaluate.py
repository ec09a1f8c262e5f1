"""The NumPy reference of a whole graph: slow, plain, and what everything else is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from bessemer.graph.core import Graph, Node, Value, topological
from bessemer.graph.dims import Dim
from bessemer.graph.schema import Env, schema_of


def evaluate_node(node: Node, operands: list[np.ndarray], env: Env) -> tuple[np.ndarray, ...]:
    """Results of one node by its NumPy reference, with the dtypes that its schema says."""
    schema = schema_of(node.op)
    extra = (node.attrs, env) if schema.needs_env else (node.attrs,)
    with np.errstate(all="ignore"):
        result = schema.reference(*operands, *extra)
    results = result if isinstance(result, tuple) else (result,)
    pairs = zip(results, node.types, strict=True)
    return tuple(np.asarray(r, dtype=t.dtype.numpy) for r, t in pairs)


def bind_sizes(graph: Graph, inputs: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Values of the symbols, read off the inputs' shapes."""
    sizes: dict[str, int] = {}
    for node in graph.nodes():
        if node.op == "input":
            given = np.shape(inputs[str(node.attrs["name"])])
            for size, actual in zip(node.types[0].shape, given, strict=True):
                if isinstance(size, Dim) and len(size.terms) == 1 and size.terms[0][1] == 1:
                    sizes.setdefault(size.terms[0][0], actual - size.const)
    return sizes


def evaluate_value(root: Value, read: Callable[[str], np.ndarray]) -> np.ndarray:
    """A weight expression over checkpoint tensors. Operands are dropped as soon as used."""
    return _run(topological([root]), [root], Env(read=read))[root]


def evaluate(
    graph: Graph,
    inputs: Mapping[str, np.ndarray],
    read: Callable[[str], np.ndarray],
    env: Env | None = None,
) -> dict[str, np.ndarray]:
    """Outputs by name. `read` gives checkpoint tensors; `env` carries KV and states over calls.
    Params that the graph's `weights` define are computed from their expressions.
    """
    env = env or Env()
    env.inputs, env.sizes = inputs, bind_sizes(graph, inputs)

    def read_stored(name: str) -> np.ndarray:
        if name in graph.weights:
            return evaluate_value(graph.weights[name], read)
        return read(name)

    env.read = read_stored
    values = _run(graph.nodes(), graph.roots, env)
    for name, value in graph.updates.items():
        env.states[name] = values[value]
    return {name: values[value] for name, value in graph.outputs.items()}


def _run(nodes: list[Node], roots: list[Value], env: Env) -> dict[Value, np.ndarray]:
    left: dict[Value, int] = {}
    for node in nodes:
        for value in node.inputs:
            left[value] = left.get(value, 0) + 1
    for root in roots:
        left[root] = left.get(root, 0) + 1
    values: dict[Value, np.ndarray] = {}
    for node in nodes:
        results = evaluate_node(node, [values[v] for v in node.inputs], env)
        values.update(zip(node.outputs, results, strict=True))
        for value in node.inputs:
            left[value] -= 1
            if not left[value]:
                values.pop(value, None)
    return values
