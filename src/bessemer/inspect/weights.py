"""Stage `weights`: the tensors of weights.bin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bessemer.artifact.layout import StoredWeight
from bessemer.graph import Value, topological
from bessemer.inspect.page import Page, columns, size_text
from bessemer.inspect.subject import Subject
from bessemer.verify.reference import PREFILL_GRAPH, weight_expressions

# Names of checkpoint tensors in a line of the table; experts are many.
SOURCES_SHOWN = 3


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
    """Tensors, parameters and bytes by storage."""
    kinds: dict[str, list[StoredWeight]] = {}
    for weight in table:
        kinds.setdefault(f"{weight.dtype} {weight.layout}", []).append(weight)
    rows: list[list[object]] = [["storage", "tensors", "parameters", "bytes", ""]]
    for kind, members in [*sorted(kinds.items()), ("all", list(table))]:
        numbers = sum(parameters(w) for w in members)
        nbytes = sum(w.nbytes for w in members)
        rows.append([kind, len(members), f"{numbers:,}", f"{nbytes:,}", size_text(nbytes)])
    return columns(rows, right=(1, 2, 3, 4))


def parameters(weight: StoredWeight) -> int:
    count = 1
    for size in weight.shape:
        count *= size
    return count
