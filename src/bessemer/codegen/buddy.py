"""The files of buddy-mlir's examples: for each entry point a main graph that unpacks one flat
parameter array, and a subgraph that computes.

    forward_prefill(arg0[N], ids[1, T])                   -> caches..., logits[1, T, V]
    forward_decode(arg0[N], ids[1, 1], position[1], caches...) -> caches..., logits[1, 1, V]

A cache is [1, heads, context, width]. Decode writes to the caches that it is given and returns
them. All that the main graphs return they have from `malloc`, but for decode's caches. The text is
plain upstream MLIR: linalg on tensors inside the subgraphs, memrefs where functions meet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bessemer.codegen.emit import Fn, contiguous_strides, memref_type
from bessemer.codegen.payload.builder import Tensor, TextFn, tensor_type
from bessemer.codegen.payload.payload import bind_symbols, write_payload
from bessemer.codegen.payload.scalar import MEMORY
from bessemer.codegen.payload.spec import PayloadSpec, Stored
from bessemer.errors import UnsupportedError
from bessemer.graph import Graph, Node, Shape, Value

# What the entry points are given besides parameters and caches.
_PREFILL_INPUTS = ("ids",)
_DECODE_INPUTS = ("ids", "positions")
_LEAVES = ("input", "param", "state")
_ALIGNMENT = 64  # bytes, of what the main graphs allocate: a cache line


@dataclass(frozen=True)
class Parameter:
    """One parameter's place in the flat file. offset: in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BuddyModules:
    """modules: MLIR text by the stem of its file, without the precision.  parameters: in the order
    of the flat file.
    """

    modules: dict[str, str]
    parameters: tuple[Parameter, ...]


def emit_buddy(prefill: Graph, decode: Graph, weights: str) -> BuddyModules:
    """The four modules. The graphs have their caches as states, and no other inputs than token
    ids and, for decode, positions. weights: "f32", "f16" or "bf16", of every parameter.

    Raises UnsupportedError where a graph needs more than the interface has.
    """
    parameters = _parameters(prefill, decode)
    modules: dict[str, str] = {}
    for phase, graph, inputs in (
        ("prefill", prefill, _PREFILL_INPUTS),
        ("decode", decode, _DECODE_INPUTS),
    ):
        call = _Call.of(graph, inputs, parameters, weights)
        modules[f"forward_{phase}"] = _emit_main(phase, call)
        modules[f"subgraph0_{phase}"] = _emit_subgraph(phase, call)
    return BuddyModules(modules, tuple(parameters.values()))


def _name(value: Value) -> str:
    return str(value.node.attrs["name"])


def _leaves(graph: Graph, op: str) -> list[Value]:
    return [node.out for node in graph.nodes() if node.op == op]


def _parameters(*graphs: Graph) -> dict[str, Parameter]:
    """By name, in the order of first use."""
    found: dict[str, Parameter] = {}
    offset = 0
    for graph in graphs:
        for value in _leaves(graph, "param"):
            name = _name(value)
            if not value.dtype.is_float:
                raise UnsupportedError(
                    f"parameter {name} holds {value.dtype}, and the flat file of --layout buddy "
                    "has floats alone: compile this model without --layout"
                )
            if name not in found:
                shape = tuple(int(str(n)) for n in value.shape)
                found[name] = Parameter(name, shape, offset)
                offset += found[name].size
    return found


@dataclass(frozen=True)
class _Argument:
    """An argument of a subgraph. place: of a parameter, in the flat array."""

    ssa: str
    value: Value
    element: str
    place: Parameter | None = None

    @property
    def writable(self) -> bool:
        return self.value.op not in ("param", "input")

    @property
    def type(self) -> str:
        """Parameters lie somewhere in a longer array; everything else is an array of its own."""
        shape = _memref_shape(self.value.shape)
        if self.place is None:
            return memref_type(shape, self.element)
        return _strided(self.place.shape, self.element, "?")


def _memref_shape(shape: Shape) -> tuple[int | str, ...]:
    return tuple(s if isinstance(s, int) else "?" for s in shape)


def _strided(shape: Sequence[int], element: str, offset: int | str) -> str:
    dims = "".join(f"{n}x" for n in shape)
    strides = ", ".join(map(str, contiguous_strides(shape) or []))
    return f"memref<{dims}{element}, strided<[{strides}], offset: {offset}>>"


@dataclass(frozen=True)
class _Call:
    """What a main graph hands to its subgraph, in order: parameters, inputs, caches, logits."""

    graph: Graph
    parameters: tuple[_Argument, ...]
    inputs: tuple[_Argument, ...]
    states: tuple[_Argument, ...]
    logits: _Argument
    flat: str

    @property
    def arguments(self) -> tuple[_Argument, ...]:
        return (*self.parameters, *self.inputs, *self.states, self.logits)

    @staticmethod
    def of(
        graph: Graph, names: Sequence[str], table: Mapping[str, Parameter], weights: str
    ) -> _Call:
        inputs = {_name(v): v for v in _leaves(graph, "input")}
        _check_inputs(inputs, names)
        params = _leaves(graph, "param")
        states = {_name(v): v for v in _leaves(graph, "state")}
        total = sum(p.size for p in table.values())
        return _Call(
            graph,
            tuple(_Argument(f"%w{i}", v, weights, table[_name(v)]) for i, v in enumerate(params)),
            tuple(_Argument(f"%{n}", inputs[n], MEMORY[inputs[n].dtype]) for n in names),
            tuple(
                _Argument(f"%kv{i}", states[n], MEMORY[states[n].dtype])
                for i, n in enumerate(sorted(states, key=_in_order))
            ),
            _Argument("%logits", graph.outputs["logits"], "f32"),
            f"memref<{total}x{weights}>",
        )


def _in_order(name: str) -> list[tuple[bool, int | str]]:
    """Sorts `cache.10.keys` after `cache.9.values`."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in name.split(".")]


def _check_inputs(inputs: Mapping[str, Value], names: Sequence[str]) -> None:
    more = sorted(set(inputs) - set(names))
    if "sequence_length" in more:
        raise UnsupportedError(
            "the rotary factors of this model depend on the length of the whole sequence, which "
            "the interface of --layout buddy doesn't have: compile this model without --layout"
        )
    missing = sorted(set(names) - set(inputs))
    if more or missing or any(len(v.shape) != 1 for v in inputs.values()):
        shown = ", ".join(f"{n}: {v.type}" for n, v in inputs.items())
        raise UnsupportedError(
            f"the interface of --layout buddy takes {', '.join(names)} (one row of integers each), "
            f"and this model takes {shown}: compile it without --layout"
        )


# --- the subgraph --------------------------------------------------------------------------------


def _emit_subgraph(phase: str, call: _Call) -> str:
    """`subgraph0_<phase>`: memrefs become tensors, the model is computed on them."""
    name = f"subgraph0_{phase}"
    fn = TextFn(name, [(a.ssa, a.type) for a in call.arguments])
    tensors = [_tensor(fn, argument) for argument in call.arguments]
    inputs, logits = tensors[:-1], tensors[-1]
    spec = _spec(call)
    results = write_payload(fn, spec, inputs, [logits], bind_symbols(fn, tensors))
    by_value = {a.value: a for a in call.arguments}
    for value, tensor in zip(spec.outputs, results, strict=True):
        target = by_value[spec.updates.get(value, value)]
        fn.line(
            f"bufferization.materialize_in_destination {tensor.ssa} in restrict writable "
            f"{target.ssa} : ({tensor.type}, {target.type}) -> ()"
        )
    return f"module {{\n{fn.text()}}}\n"


def _tensor(fn: TextFn, argument: _Argument) -> Tensor:
    type_ = tensor_type(argument.value.shape, argument.element)
    op = f"bufferization.to_tensor {argument.ssa} restrict"
    op += " writable" if argument.writable else ""
    ssa = fn.op(f"{op} : {argument.type} to {type_}")
    return Tensor(ssa, argument.value.shape, argument.element)


def _spec(call: _Call) -> PayloadSpec:
    graph = call.graph
    states = {_name(a.value): a.value for a in call.states}
    updates = {value: states[name] for name, value in graph.updates.items()}
    nodes: list[Node] = [n for n in graph.nodes() if n.op not in _LEAVES]
    return PayloadSpec(
        tuple(nodes),
        tuple(a.value for a in call.arguments[:-1]),
        (call.logits.value, *updates),
        {a.value: Stored(a.element) for a in call.parameters},
        updates,
    )


# --- the main graph ------------------------------------------------------------------------------


def _emit_main(phase: str, call: _Call) -> str:
    """`forward_<phase>`: unpacks the parameters, makes room for what it returns, calls the
    subgraph. Decode is given its caches; prefill makes them, all zero.
    """
    is_decode = phase == "decode"
    given = [*call.inputs, *(call.states if is_decode else ())]
    made = [*(() if is_decode else call.states), call.logits]
    returned = [*call.states, call.logits]
    name = f"subgraph0_{phase}"
    fn = Fn(
        f"forward_{phase}",
        [("%arg0", call.flat), *((a.ssa, _outer_type(a)) for a in given)],
        attributes="llvm.emit_c_interface",
        results=[_outer_type(a) for a in returned],
    )
    outer = {a.ssa: a.ssa for a in given} | {a.ssa: _made(fn, a, call) for a in made}
    operands = [_unpacked(fn, a, call) for a in call.parameters]
    others = call.arguments[len(call.parameters) :]
    operands += [_without_batch(fn, outer[a.ssa], a) for a in others]
    types = ", ".join(a.type for a in call.arguments)
    fn.line(f"func.call @{name}({', '.join(operands)}) : ({types}) -> ()")
    results = ", ".join(outer[a.ssa] for a in returned)
    fn.line(f"return {results} : {', '.join(_outer_type(a) for a in returned)}")
    declaration = f"  func.func private @{name}({types})\n"
    return f"module {{\n{declaration}{fn.text()}}}\n"


def _has_batch(argument: _Argument) -> bool:
    """Everything has a leading dimension of 1, the batch, but for positions."""
    return argument.ssa != "%positions"


def _outer_type(argument: _Argument) -> str:
    shape = _memref_shape(argument.value.shape)
    return memref_type((1, *shape) if _has_batch(argument) else shape, argument.element)


def _made(fn: Fn, argument: _Argument, call: _Call) -> str:
    """New memory: a cache full of zeros, or logits as they come."""
    type_ = _outer_type(argument)
    rows = ""
    if "?" in type_:
        ids = next(a for a in call.inputs if a.ssa == "%ids")
        rows = fn.op(f"memref.dim %ids, {fn.index(1)} : {_outer_type(ids)}")
    memory = fn.op(f"memref.alloc({rows}) {{alignment = {_ALIGNMENT} : i64}} : {type_}")
    if argument is not call.logits:
        zero = "0.0" if argument.value.dtype.is_float else "0"
        start = fn.constant(f"arith.constant {zero} : {argument.element}")
        fn.line(f"linalg.fill ins({start} : {argument.element}) outs({memory} : {type_})")
    return memory


def _unpacked(fn: Fn, argument: _Argument, call: _Call) -> str:
    """A parameter as a part of the flat array."""
    place = argument.place
    assert place is not None
    type_ = _strided(place.shape, argument.element, place.offset)
    sizes = ", ".join(map(str, place.shape))
    steps = ", ".join(map(str, contiguous_strides(place.shape) or []))
    fn.comment(place.name)
    part = fn.op(
        f"memref.reinterpret_cast %arg0 to offset: [{place.offset}], sizes: [{sizes}], "
        f"strides: [{steps}] : {call.flat} to {type_}"
    )
    return fn.op(f"memref.cast {part} : {type_} to {argument.type}")


def _without_batch(fn: Fn, ssa: str, argument: _Argument) -> str:
    rank = len(argument.value.shape)
    if not _has_batch(argument):
        return ssa
    groups = [[0, 1], *([i] for i in range(2, rank + 1))] if rank else []
    return fn.op(
        f"memref.collapse_shape {ssa} {groups} : {_outer_type(argument)} into {argument.type}"
    )
