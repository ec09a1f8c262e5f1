"""Graph to text. `parse_graph(print_graph(g))` is `g` again.

graph @name {
  %0 = input {name = "ids", dtype = i64, shape = [T]} : i64[T]
  %1, %2 = topk(%0) {k = 2} : f32[T, 2], i64[T, 2]
  output logits = %1
  update cache = %2
  weight "merged" = %3
}
"""

from __future__ import annotations

import json

import numpy as np

from bessemer.graph.core import Attr, Graph, Node, Value, topological
from bessemer.graph.dims import Dim
from bessemer.graph.dtypes import DType
from bessemer.graph.schema import schema_of


def _number(x: object) -> str:
    """Shortest text that reads back as the same number; floats always show as floats."""
    if isinstance(x, (bool, np.bool_)):
        return "true" if x else "false"
    if isinstance(x, (int, np.integer)):
        return str(int(x))
    text = repr(float(str(x))) if isinstance(x, np.floating) else repr(x)
    return text


def format_attr(value: Attr) -> str:
    if isinstance(value, DType):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Dim):
        return str(value)
    if isinstance(value, np.ndarray):
        shape = ", ".join(map(str, value.shape))
        items = ", ".join(_number(x) for x in value.reshape(-1))
        return f"{DType.of(value.dtype)}[{shape}]<{items}>"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(format_attr(v) for v in value) + "]"
    return _number(value)


def _key(name: str) -> str:
    """A name as it stands if it is one word, quoted otherwise."""
    return name if name.isascii() and name.isidentifier() else json.dumps(name, ensure_ascii=False)


def _format_node(node: Node, names: dict[Value, str]) -> str:
    results = ", ".join(names[v] for v in node.outputs)
    operands = f"({', '.join(names[v] for v in node.inputs)})" if node.inputs else ""
    defaults = schema_of(node.op).attrs
    shown = [
        f"{k} = {format_attr(v)}"
        for k, v in node.attrs.items()
        if isinstance(v, np.ndarray) or isinstance(defaults[k], np.ndarray) or v != defaults[k]
    ]
    attrs = f" {{{', '.join(shown)}}}" if shown else ""
    return f"{results} = {node.op}{operands}{attrs} : {', '.join(map(str, node.types))}"


def print_graph(graph: Graph, *, locations: bool = False) -> str:
    """The graph as text; with `locations`, each op's module path and source line as a comment."""
    names: dict[Value, str] = {}
    lines = [f"graph @{graph.name} {{"]
    for node in topological([*graph.roots, *graph.weights.values()]):
        for value in node.outputs:
            names[value] = f"%{len(names)}"
        comment = f"  // {node.loc}" if locations and node.loc else ""
        lines.append(f"  {_format_node(node, names)}{comment}")
    lines += [f"  output {_key(k)} = {names[v]}" for k, v in graph.outputs.items()]
    lines += [f"  update {_key(k)} = {names[v]}" for k, v in graph.updates.items()]
    lines += [f"  weight {json.dumps(k)} = {names[v]}" for k, v in graph.weights.items()]
    return "\n".join([*lines, "}"]) + "\n"
