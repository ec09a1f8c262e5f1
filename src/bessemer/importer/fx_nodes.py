"""Reading FX nodes: where they come from, their sizes, what they write and what is live."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import sympy
import torch

from bessemer.graph import TensorType
from bessemer.graph.dims import Dim, Size
from bessemer.importer.aten import NoMapping, dtype_of
from bessemer.importer.aten_views import VIEWS

TOKENS = Dim.sym("T")
# Higher-order ops that only set a mode: target name -> position of the inner graph.
_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
_SPLITS = ("chunk", "split", "split_with_sizes", "unbind", "tensor_split")


def location(node: torch.fx.Node, prefix: str = "") -> str:
    """`module.path (file.py:line)` of the model's own innermost source line."""
    stack = node.meta.get("nn_module_stack") or {}
    path = [entry[0] for entry in stack.values()][-1] if stack else ""
    path = path.replace("L['self'].", "").replace("L['self']", "").removeprefix(prefix)
    lines = [x.strip() for x in (node.meta.get("stack_trace") or "").splitlines() if "File" in x]
    home = str(Path(torch.__file__).parent)
    own = [x for x in lines if home not in x] or lines
    if not own:
        return path
    pieces = own[-1].split('"')
    number = pieces[2].split("line ")[1].split(",")[0]
    return f"{path} ({Path(pieces[1]).name}:{number})".strip()


def size_of(size: Any) -> Size:
    """A torch size as a graph size. Raises NoMapping when it is not linear in the token count."""
    if isinstance(size, int):
        return size
    expr = size.node.expr if isinstance(size, torch.SymInt) else size
    return _linear(sympy.expand(expr))


def _linear(expr: Any) -> Size:
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        if str(expr).startswith("u"):
            raise NoMapping("a size that depends on the data")
        return TOKENS
    if expr.is_Add:
        total: Size = 0
        for term in expr.args:
            total = _linear(term) + total
        return total
    if expr.is_Mul:
        first, *rest = expr.args
        if first.is_Integer and len(rest) == 1:
            return _linear(rest[0]) * int(first)
    raise NoMapping(f"the size {expr} is not a multiple of the number of tokens")


def type_of(value: torch.Tensor) -> TensorType:
    return TensorType(dtype_of(value.dtype), tuple(size_of(s) for s in value.shape))


def mutated(node: torch.fx.Node) -> torch.fx.Node | None:
    """The operand that a node writes in place, if any."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return value
    return None


def is_split(node: torch.fx.Node) -> bool:
    """Whether a node gives a list of views of its operand."""
    return str(node.target).split(".")[1:2] in [[name] for name in _SPLITS]


def may_be_view(node: torch.fx.Node) -> bool:
    return str(node.target) in VIEWS or is_split(node)


def shares_memory(node: torch.fx.Node) -> bool:
    """Whether a possible view did keep its operand's memory when it was traced."""
    values = [node.args[0].meta.get("val"), node.meta.get("val")]  # type: ignore[union-attr]
    first, second = (v[0] if isinstance(v, (list, tuple)) else v for v in values)
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def owner_of(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory a node shares, through views and in-place ops."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], torch.fx.Node):
        same = node.target is operator.getitem and is_split(node.args[0])
        if not same and mutated(node) is None and not (may_be_view(node) and shares_memory(node)):
            break
        node = node.args[0]
    return node


def region_of(node: torch.fx.Node) -> int | None:
    """Where a higher-order op that only sets a mode has its inner graph."""
    return _REGIONS.get(getattr(node.target, "__name__", ""), _REGIONS.get(str(node.target)))


def live_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes that the outputs or the written buffers need; asserts and unused masks are not."""
    nodes = list(graph.nodes)
    writers: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in nodes:
        operand = mutated(node)
        if operand is not None:
            writers.setdefault(owner_of(operand), []).append(node)
    live: set[torch.fx.Node] = set()
    queue = [n for n in nodes if n.op == "output"]
    queue += [n for owner, found in writers.items() if owner.op == "placeholder" for n in found]
    while queue:
        node = queue.pop()
        if node not in live:
            live.add(node)
            queue += [*node.all_input_nodes, *writers.get(owner_of(node), ())]
    return live
