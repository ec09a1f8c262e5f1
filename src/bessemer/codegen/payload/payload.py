"""Payloads: the computation of a group as one function on tensors.

The text is linalg, tensor, arith, math and scf, in destination-passing style: the last arguments
are the memory of the results. It stands for itself: `mlir-opt` reads it, and it can be lowered and
called alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bessemer.codegen.payload.builder import Builder, Tensor, TextFn
from bessemer.codegen.payload.decompose import decompose
from bessemer.codegen.payload.fusion import is_inline, plan
from bessemer.codegen.payload.scalar import MEMORY
from bessemer.codegen.payload.spec import PayloadSpec
from bessemer.errors import CompileError
from bessemer.graph.core import Node, Value
from bessemer.graph.dims import Dim, Size


def emit_payload(name: str, spec: PayloadSpec) -> str:
    """`func.func @name(%in0, ..., %out0, ...) -> (results)` on tensors, as MLIR text.

    Inputs in the order of the spec (weights as they are stored), then the memory of the results;
    results in the order of `spec.outputs`, an updated state among them. Raises CompileError.
    """
    inputs = [_argument(f"%in{i}", v, spec) for i, v in enumerate(spec.inputs)]
    targets = [
        Tensor(f"%out{i}", v.shape, MEMORY[v.dtype]) for i, v in enumerate(spec.destinations)
    ]
    results = [_result_type(v, spec, inputs, targets) for v in spec.outputs]
    fn = TextFn(name, [(t.ssa, t.type) for t in [*inputs, *targets]], results=results)
    symbols = bind_symbols(fn, [*inputs, *targets])
    found = write_payload(fn, spec, inputs, targets, symbols)
    fn.line(f"return {', '.join(t.ssa for t in found)} : {', '.join(t.type for t in found)}")
    return fn.text()


def _argument(ssa: str, value: Value, spec: PayloadSpec) -> Tensor:
    storage = spec.storage(value)
    return Tensor(ssa, value.shape, storage.dtype, storage.layout)


def _result_type(
    value: Value, spec: PayloadSpec, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> str:
    if value in spec.updates:
        return inputs[spec.inputs.index(spec.updates[value])].type
    return targets[spec.destinations.index(value)].type


def bind_symbols(fn: TextFn, tensors: Sequence[Tensor]) -> dict[str, str]:
    """Each symbol's value, read off the shape of an argument that has it as a dimension."""
    found: dict[str, str] = {}
    for tensor in tensors:
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, Dim) and len(size.terms) == 1:
                (symbol, factor), *_ = size.terms
                if symbol not in found:
                    dim = fn.op(f"tensor.dim {tensor.ssa}, {fn.index(axis)} : {tensor.type}")
                    found[symbol] = solved(fn, dim, factor, size.const)
    return found


def solved(fn: TextFn, extent: str, factor: int, const: int) -> str:
    """The symbol's value where factor * symbol + const is the extent."""
    if const:
        extent = fn.sub(extent, fn.index(const))
    return extent if factor == 1 else fn.div(extent, fn.index(factor))


def write_payload(
    fn: TextFn,
    spec: PayloadSpec,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    symbols: Mapping[str, int | str],
    row: str | None = None,
) -> list[Tensor]:
    """Write the computation into `fn` and return a tensor for each of the spec's outputs.

    symbols: the symbolic sizes as numbers or SSA indices. row: with the rows' symbol as 1, the row.
    """
    nodes, primitive = decompose(spec)
    builder = Builder(fn, plan(nodes, primitive.values()), symbols, row)
    sizes = list(_sizes(nodes, spec))
    _check_bound(sizes, symbols)
    builder.prepare(sizes)
    builder.env.update(zip(spec.inputs, inputs, strict=True))
    memory = dict(zip(spec.destinations, targets, strict=True))
    for value, state in spec.updates.items():
        memory[value] = builder.env[state]
        builder.in_place |= _store_chain(primitive[value], state)
    direct = _aim(builder, spec, primitive, memory)
    for node in nodes:
        builder.add(node)
    return [
        builder.env[primitive[v]] if v in direct else _copy_out(builder, primitive[v], memory[v])
        for v in spec.outputs
    ]


def _copy_out(builder: Builder, value: Value, target: Tensor) -> Tensor:
    builder.fn.comment(f"output {value.type}")
    return builder.computed(value, target)


def _sizes(nodes: Sequence[Node], spec: PayloadSpec) -> Iterator[Size]:
    for node in nodes:
        for value in (*node.inputs, *node.outputs):
            yield from value.shape
        for key in ("start", "stop"):
            bound = node.attrs.get(key)
            if isinstance(bound, Dim):
                yield bound
    for value in (*spec.inputs, *spec.outputs):
        yield from value.shape


def _check_bound(sizes: Sequence[Size], symbols: Mapping[str, int | str]) -> None:
    names = {name for size in sizes if isinstance(size, Dim) for name, _ in size.terms}
    unknown = sorted(names - set(symbols))
    if unknown:
        raise CompileError(f"no operand of the group tells the size {', '.join(unknown)}")


def _store_chain(value: Value, state: Value) -> set[Value]:
    """The stores of which an updated state is made, if they start from the state itself."""
    chain: set[Value] = set()
    while value.op in ("put", "scatter"):
        chain.add(value)
        value = value.node.inputs[0]
    return chain if value == state else set()


def _aim(
    builder: Builder,
    spec: PayloadSpec,
    primitive: Mapping[Value, Value],
    memory: Mapping[Value, Tensor],
) -> set[Value]:
    """Let what computes an output write to its memory; returns the outputs where that is possible.
    What gives a reshaped output writes to the reshaped memory.
    """
    direct: set[Value] = set()
    outputs = set(primitive.values())
    for value in spec.outputs:
        maker = primitive[value]
        if maker in builder.in_place:
            direct.add(value)
            continue
        while maker.op == "reshape" and maker not in builder.plan.material:
            maker = maker.node.inputs[0]
            if maker in outputs:
                break
        computed = not is_inline(maker.node) or maker in builder.plan.material
        free = maker not in builder.targets and maker not in builder.env
        if computed and free and maker.op != "constant":
            if maker != primitive[value] and maker in outputs:
                continue
            builder.targets[maker] = builder.reshaped(memory[value], builder.shape(maker))
            direct.add(value)
    return direct
