"""Matrix products."""

from __future__ import annotations

from collections.abc import Sequence

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.payload.attrs import integer, integers
from bessemer.codegen.payload.builder import Body, Builder, Tensor
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
    b: Builder, x: Tensor, weight: Tensor, lead: Sequence[str], target: Tensor | None
) -> Tensor:
    """x[..., K] @ weight[lead..., N, K].T in f32, into `target` where that is given."""
    if weight.layout != "panels":
        return _row_product(b, x, weight, lead, target)
    flat = _panel_product(b, x, weight, lead)
    columns = weight.shape[-2]
    if flat.shape[-1] != columns:
        flat = b.part(flat, ["0"] * len(flat.shape), (*flat.shape[:-1], columns))
    return flat if target is None else b.copied(flat, target)


def _row_product(
    b: Builder, x: Tensor, weight: Tensor, lead: Sequence[str], target: Tensor | None
) -> Tensor:
    """Rows of the weight as they are: each result is a sum along a row."""
    rows, columns, depth = x.shape[:-1], weight.shape[-2], weight.shape[-1]
    s, m = Scalars(b.fn, DType.F32), len(rows)
    at, n, k = tuple(f"d{i}" for i in range(m)), f"d{m}", f"d{m + 1}"

    def step(body: Body, old: list[str]) -> list[str]:
        factors = [body.load(x, (*at, k), DType.F32), body.load(weight, (*lead, n, k), DType.F32)]
        return [s.accumulate("sum", old[0], s.product(*factors))]

    start = b.filled(target or b.empty((*rows, columns), "f32"), s.const(0))
    return b.generic((*rows, columns, depth), [(start, (*at, n))], step, [m + 1])[0]


def _panel_product(b: Builder, x: Tensor, weight: Tensor, lead: Sequence[str]) -> Tensor:
    """[..., panels * 32], missing rows 0. The rows of a panel are the lanes of one vector, so that
    no sum runs across lanes; LLVM does not find that by itself.
    """
    fn, rows, depth = b.fn, x.shape[:-1], x.shape[-1]
    panels = weight.stored[-3]
    assert isinstance(panels, int)
    lanes = f"vector<{PANEL_ROWS}xf32>"
    loaded = f"vector<{PANEL_ROWS}x{weight.element}>"
    zero = fn.constant(f"arith.constant 0.0 : {weight.element}")
    first = [fn.index(int(n)) for n in lead]
    origin = fn.index(0)

    def one(held: Tensor, at: list[str]) -> Tensor:
        start = fn.constant(f"arith.constant dense<0.0> : {lanes}")
        with fn.loop(origin, b.extent(depth), 1, [(start, lanes)]) as loop:
            place = ", ".join([*first, at[-1], loop.iv, origin])
            read = f"vector.transfer_read {weight.ssa}[{place}], {zero} {{in_bounds = [true]}}"
            w = fn.op(f"{read} : {weight.type}, {loaded}")
            if weight.element != "f32":
                w = fn.op(f"arith.extf {w} : {loaded} to {lanes}")
            a = fn.broadcast(b.element(x, [*at[:-1], loop.iv], DType.F32), PANEL_ROWS)
            product = fn.op(f"arith.mulf {a}, {w} fastmath<contract> : {lanes}")
            total = f"{loop.args[0]}, {product} fastmath<contract>"
            loop.carry(fn.op(f"arith.addf {total} : {lanes}"))
        (total,) = loop.results
        place = ", ".join([*at, origin])
        write = f"vector.transfer_write {total}, {held.ssa}[{place}] {{in_bounds = [true]}}"
        return Tensor(fn.op(f"{write} : {lanes}, {held.type}"), held.shape, held.element)

    result = nest(b, (*rows, panels), b.empty((*rows, panels, PANEL_ROWS), "f32"), one)
    return b.reshaped(result, (*rows, panels * PANEL_ROWS))


def project(b: Builder, node: Node) -> None:
    """x @ w[lead].T with a stored weight. The result is a temporary that the epilogue reads."""
    x, w = node.inputs
    lead = [str(i) for i in integers(node, "lead")]
    b.env[node.out] = weight_product(b, b.tensor(x), b.tensor(w), lead, b.targets.get(node.out))


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
