"""Checks that a graph is well formed; runs after every pass."""

from __future__ import annotations

from bessemer.graph.core import Graph, topological
from bessemer.graph.schema import GraphError, complete_attrs, infer_types, schema_of


def verify(graph: Graph) -> None:
    """Raises GraphError that names the op, its origin and what does not hold."""
    if not graph.outputs:
        raise GraphError(f"graph @{graph.name} has no outputs")
    names: dict[tuple[str, str], object] = {}
    for node in topological([*graph.roots, *graph.weights.values()]):
        where = f"{node.op} ({node.loc})" if node.loc else node.op
        attrs = complete_attrs(schema_of(node.op), node.attrs)
        inferred = infer_types(node.op, [v.type for v in node.inputs], attrs)
        if inferred != node.types:
            raise GraphError(f"{where} is typed {node.types}, its rule says {inferred}")
        for value in node.inputs:
            if not 0 <= value.index < len(value.node.types):
                raise GraphError(f"{where} uses result {value.index} of {value.node.op}")
        if node.op in ("input", "state", "param"):
            key = (node.op, str(node.attrs["name"]))
            if names.setdefault(key, node.types) != node.types:
                raise GraphError(f"{node.op} {key[1]!r} has two types")
    layers = [n.attrs["layer"] for n in graph.nodes() if n.op.endswith("attention")]
    if len(layers) != len(set(layers)):
        raise GraphError("two attention ops write the KV cache of one layer")
    for state, value in graph.updates.items():
        held = names.get(("state", state))
        if held is not None and held != (value.type,):
            raise GraphError(f"update of state {state!r} has type {value.type}, not {held}")
    for name, value in graph.weights.items():
        leaves = {n.op for n in topological([value]) if not n.inputs}
        if not leaves <= {"param", "constant", "iota"}:
            raise GraphError(f"weight {name!r} depends on {', '.join(sorted(leaves))}")
