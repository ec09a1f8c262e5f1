"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.payload.attrs import integer, integers
from bessemer.codegen.payload.builder import Body, Builder, Index, Tensor
from bessemer.codegen.payload.decompose import WHOLE
from bessemer.codegen.payload.movement import index_of, nest, table_slice
from bessemer.codegen.payload.scalar import Scalars
from bessemer.graph.core import Node, Value
from bessemer.graph.dims import Shape
from bessemer.graph.dtypes import DType


def matmul(b: Builder, node: Node) -> None:
    """a @ b with broadcast leading dimensions. The columns of the result are the inner loop, or
    the sum is, where that reads b along its rows.
    """
    left, right = node.inputs
    transposed = bool(node.attrs["transpose_b"])
    result = b.target(node.out)
    *batch, rows, columns = result.shape
    inner = b.shape(left)[-1]
    dot = transposed != _is_transposed(right)
    n = len(batch)
    domain = (*batch, rows, columns, inner) if dot else (*batch, rows, inner, columns)
    lead = tuple(f"d{i}" for i in range(n))
    row, last = f"d{n}", (f"d{n + 1}", f"d{n + 2}")
    column, depth = last if dot else last[::-1]
    s = Scalars(b.fn, left.dtype)

    def step(body: Body, old: list[str]) -> list[str]:
        x = body.read(left, b.broadcast(left, (*lead, row, depth)))
        at = (*lead, column, depth) if transposed else (*lead, depth, column)
        y = body.read(right, b.broadcast(right, at))
        return [s.accumulate("sum", old[0], s.product(x, y))]

    start = b.filled(result, s.const(0))
    reduced = [n + 2 if dot else n + 1]
    b.env[node.out] = b.generic(domain, [(start, (*lead, row, column))], step, reduced)[0]


def _is_transposed(value: Value) -> bool:
    """Whether the last axis of a view is not the last in memory."""
    while value.op in ("permute", "expand"):
        if value.op == "permute" and integers(value.node, "perm")[-1] != value.type.rank - 1:
            return True
        value = value.node.inputs[0]
    return False


def weight_product(
    b: Builder, x: Tensor | Value, weight: Tensor, lead: Sequence[str], target: Tensor | None
) -> Tensor:
    """x[..., K] @ weight[lead..., N, K].T, into `target` where that is given."""
    rows, depth = (b.shape(x) if isinstance(x, Value) else x.shape)[:-1], weight.shape[-1]
    columns = weight.shape[-2]
    s, m = Scalars(b.fn, DType.F32), len(rows)
    at = tuple(f"d{i}" for i in range(m))
    packed = weight.layout == "panels"
    if packed:
        # Panels: the rows of a panel are the inner loop, so that no sum runs across lanes.
        panels = weight.stored[-3]
        domain: Shape = (*rows, panels, depth, PANEL_ROWS)
        k, place = f"d{m + 1}", (*at, f"d{m}", f"d{m + 2}")
        stored: Index = (*lead, f"d{m}", k, f"d{m + 2}")
        result, reduced = b.empty((*rows, panels, PANEL_ROWS), "f32"), [m + 1]
        weight = Tensor(weight.ssa, weight.stored, weight.element)
    else:
        domain, k, place = (*rows, columns, depth), f"d{m + 1}", (*at, f"d{m}")
        stored, reduced = (*lead, f"d{m}", k), [m + 1]
        result = target or b.empty((*rows, columns), "f32")

    def step(body: Body, old: list[str]) -> list[str]:
        where = (*at, k)
        a = body.read(x, where) if isinstance(x, Value) else body.load(x, where, DType.F32)
        w = body.load(weight, stored, DType.F32)
        return [s.accumulate("sum", old[0], s.product(a, w))]

    found = b.generic(domain, [(b.filled(result, s.const(0)), place)], step, reduced)[0]
    if not packed:
        return found
    assert isinstance(panels, int)
    flat = b.reshaped(found, (*rows, panels * PANEL_ROWS))
    if flat.shape[-1] != columns:
        flat = b.part(flat, ["0"] * (m + 1), (*rows, columns))
    return flat if target is None else b.copied(flat, target)


def project(b: Builder, node: Node) -> None:
    """x @ w[lead].T with a stored weight. The result is a temporary that the epilogue reads."""
    x, w = node.inputs
    lead = [str(i) for i in integers(node, "lead")]
    b.env[node.out] = weight_product(b, x, b.tensor(w), lead, b.targets.get(node.out))


def expert_project(b: Builder, node: Node) -> None:
    """One product for each row and chosen expert; other experts' weights are not touched."""
    x, indices, w = node.inputs
    rows, index, weights = b.tensor(x), b.tensor(indices), b.tensor(w)
    result = b.target(node.out)
    columns = result.shape[-1]
    part = integer(node, "part")
    lead = [] if part == WHOLE else [str(part)]
    shared = len(rows.shape) == len(index.shape)

    def one(held: Tensor, at: list[str]) -> Tensor:
        expert = index_of(b, index, at, weights.shape[0])
        chosen = table_slice(b, weights, 0, expert)
        where = at[:-1] if shared else at
        box: Shape = (*[1] * len(where), rows.shape[-1])
        row = b.part(rows, [*where, "0"], box, drop=range(len(where)))
        place = (*[1] * len(at), columns)
        slot = b.part(held, [*at, "0"], place, drop=range(len(at)))
        y = weight_product(b, row, chosen, lead, slot)
        return b.inserted(y, held, [*at, "0"], place)

    b.env[node.out] = nest(b, index.shape, result, one)
