"""Stage `weights`: the tensors of weights.bin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bessemer.artifact.layout import StoredWeight
from bessemer.graph import Graph, Node, Value, topological
from bessemer.inspect.page import Page, columns, size_text
from bessemer.inspect.subject import Subject
from bessemer.verify.reference import PREFILL_GRAPH, weight_expressions

# Names of checkpoint tensors in a line of the table; experts are many.
SOURCES_SHOWN = 3
# Ops that read rows of a table, with the operand that is the table.
TABLE_OPERAND = {"embedding": 0, "take": 0}
# What leaves the numbers of looked-up rows as they are.
_MOVED = ("reshape", "permute", "slice", "expand")


def weights(subject: Subject) -> Page:
    """Name, shape, storage, place, bytes, and what checkpoint tensors each is made of."""
    table = stored_weights(subject)
    expressions = _expressions(subject)
    rows: list[list[object]] = [["name", "shape", "dtype", "layout", "offset", "bytes", "made of"]]
    data = []
    for weight in table:
        made_of = _made_of(weight.name, expressions)
        shape = "x".join(map(str, weight.shape)) or "scalar"
        rows.append(
            [
                weight.name,
                shape,
                weight.dtype,
                weight.layout,
                weight.offset,
                weight.nbytes,
                made_of,
            ]
        )
        data.append({**weight.to_json(), "shape": list(weight.shape), "made_of": made_of})
    return Page(columns(rows, right=(4, 5)) + "\n" + totals(table), data)


def stored_weights(subject: Subject) -> Sequence[StoredWeight]:
    if subject.artifact is not None:
        return subject.artifact.manifest.weights
    return subject.compilation.generated.weights


def _expressions(subject: Subject) -> Mapping[str, Value]:
    """How stored weights are made of the checkpoint's tensors."""
    if subject.artifact is None:
        return subject.compilation.generated.expressions
    kept = subject.kept_graph(PREFILL_GRAPH)
    return {} if kept is None else weight_expressions([kept])


def _made_of(name: str, expressions: Mapping[str, Value]) -> str:
    expression = expressions.get(name)
    if expression is None:
        return ""
    if expression.op == "param":
        source = str(expression.node.attrs["name"])
        return "" if source == name else source
    order = topological([expression])
    params = [str(n.attrs["name"]) for n in order if n.op == "param"]
    ops = "+".join(dict.fromkeys(n.op for n in order if n.op not in ("param", "constant")))
    shown = ", ".join(params[:SOURCES_SHOWN])
    more = len(params) - SOURCES_SHOWN
    return f"{ops} of {shown}" + (f" and {more} more" if more > 0 else "")


def totals(table: Sequence[StoredWeight]) -> str:
    """Tensors, their numbers and bytes by storage."""
    kinds: dict[str, list[StoredWeight]] = {}
    for weight in table:
        kinds.setdefault(f"{weight.dtype} {weight.layout}", []).append(weight)
    rows: list[list[object]] = [["storage", "tensors", "numbers", "bytes", ""]]
    for kind, members in [*sorted(kinds.items()), ("all", list(table))]:
        count = sum(number_count(w) for w in members)
        nbytes = sum(w.nbytes for w in members)
        rows.append([kind, len(members), f"{count:,}", f"{nbytes:,}", size_text(nbytes)])
    return columns(rows, right=(1, 2, 3, 4))


def number_count(weight: StoredWeight) -> int:
    """How many numbers a stored weight is."""
    return math.prod(weight.shape)


# --- parameters -----------------------------------------------------------------------------------


def parameter_count(graph: Graph) -> int:
    """Numbers of the checkpoint's tensors that a graph's weights are made of, each tensor once,
    however often and in what form it is stored. Integer tables (which experts a token goes to) are
    no parameters: nobody trains them.
    """
    tables = integer_tables(graph)
    tensors: dict[str, int] = {}
    for name, expression in weight_expressions([graph]).items():
        for node in topological([expression]) if name not in tables else []:
            if node.op == "param" and node.types[0].dtype.is_float:
                sizes = [int(str(size)) for size in node.types[0].shape]
                tensors[str(node.attrs["name"])] = math.prod(sizes)
    return sum(tensors.values())


def integer_tables(graph: Graph) -> frozenset[str]:
    """Stored weights whose rows are looked up as integers. They are f32 in a graph, where small
    integers are exact.
    """
    uses = graph.uses()

    def ends_in_integers(value: Value) -> bool:
        users = uses.get(value, [])
        return bool(users) and all(
            not user.types[0].dtype.is_float
            if user.op == "cast"
            else user.op in _MOVED and ends_in_integers(user.out)
            for user in users
        )

    def is_table(node: Node) -> bool:
        users = uses.get(node.out, [])
        looked_up = [
            u for u in users if u.op in TABLE_OPERAND and u.inputs[TABLE_OPERAND[u.op]] == node.out
        ]
        return len(looked_up) == len(users) > 0 and all(ends_in_integers(u.out) for u in looked_up)

    params = [node for node in graph.nodes() if node.op == "param"]
    return frozenset(str(node.attrs["name"]) for node in params if is_table(node))
