"""ExportedProgram to Graph: every live ATen node through the table, all unknown ones reported.

Mutation becomes value flow here: an FX value names a `Slot`; an in-place op writes the slot of its
first operand, through views back to the tensor that owns the memory. A buffer that is written is
a named state of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from bessemer.errors import UnsupportedError
from bessemer.graph import DType, Graph, GraphError, TensorType, Value, constant, emit, param
from bessemer.importer import (  # noqa: F401  (the families enter their functions into the table)
    aten_contractions,
    aten_definitions,
    aten_elementwise,
    aten_indexing,
    aten_reductions,
    aten_views,
)
from bessemer.importer.aten import TABLE, Builder, Complex, Handler, NoMapping
from bessemer.importer.aten_views import VIEWS, part_back
from bessemer.importer.fx_nodes import (
    TOKENS,
    live_nodes,
    location,
    may_be_view,
    mutated,
    owner_of,
    region_of,
    shares_memory,
    size_of,
    type_of,
)

# A buffer that is not in the checkpoint goes into the graph as a constant up to this many
# elements (rotary frequencies); beyond it becomes a weight, so that the graph stays small.
INLINE_ELEMENTS = 1024
_UNKNOWN = "no graph op for it"


@dataclass(frozen=True)
class Converted:
    """A graph, and the values of params that are not in the checkpoint (by name)."""

    graph: Graph
    extra: Mapping[str, torch.Tensor]


@dataclass(eq=False)
class Slot:
    """What an FX tensor names: a value of its own, or a view of another slot's."""

    value: Any = None
    parent: Slot | None = None
    forward: Callable[[Any], Any] | None = None
    inverse: Callable[[Any, Any], Any] | None = None
    seen: Any = None

    def read(self) -> Any:
        if self.parent is not None and self.forward is not None:
            source = self.parent.read()
            if source is not self.seen:
                self.value, self.seen = self.forward(source), source
        return self.value

    def write(self, new: Any) -> None:
        if self.parent is None:
            self.value = new
        elif self.inverse is None:
            raise NoMapping("an in-place write through this view")
        else:
            self.parent.write(self.inverse(self.parent.read(), new))


@dataclass
class Problems:
    """What can't be converted, collected over the whole graph."""

    prefix: str
    found: list[str] = field(default_factory=list)

    def add(self, node: torch.fx.Node, reason: str) -> None:
        where = location(node, self.prefix) or "no source line"
        self.found.append(f"  {node.target} ({node.name}) at {where}: {reason}")

    def check(self, name: str) -> None:
        if self.found:
            count = len(self.found)
            head = f"{name}: {count} operation{'s' if count > 1 else ''} can't be compiled:\n"
            raise UnsupportedError(head + "\n".join(self.found))


@dataclass
class Converter:
    """Walks a program once. Use `convert`."""

    program: torch.export.ExportedProgram
    name: str
    leaf: Callable[[str, TensorType], Value]
    prefix: str
    slots: dict[torch.fx.Node, Any] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, Slot] = field(default_factory=dict)
    problems: Problems = field(init=False)
    live: set[torch.fx.Node] = field(default_factory=set)
    mutating: bool = False
    layers: int = 0
    length: Value | None = None

    def __post_init__(self) -> None:
        self.problems = Problems(self.prefix)

    def run(self) -> Converted:
        graph = self.program.graph
        self.live = live_nodes(graph)
        self.mutating = any(mutated(n) is not None for n in self.live)
        self.leaves(graph)
        results = self.body(graph)
        self.problems.check(self.name)
        logits = self.logits(results)
        updates = {
            name: slot.read() for name, slot in self.states.items() if slot.read().op != "state"
        }
        return Converted(Graph(self.name, {"logits": logits}, updates), self.extra)

    # --- leaves --------------------------------------------------------------------------------

    def leaves(self, graph: torch.fx.Graph) -> None:
        written = {owner_of(m) for n in self.live if (m := mutated(n)) is not None}
        inputs = iter(("ids", "positions"))
        ids = TensorType(DType.I64, (1, TOKENS))
        placeholders = {n.name: n for n in graph.nodes if n.op == "placeholder"}
        for spec in self.program.graph_signature.input_specs:
            node = placeholders[spec.arg.name]
            if spec.kind == InputKind.USER_INPUT:
                name = next(inputs)
                value = emit("input", name=name, dtype=ids.dtype, shape=ids.shape)
                if name == "positions":
                    self.positions = value
                given = type_of(node.meta["val"])
                slot = value if given.rank == 2 else emit("reshape", value, shape=given.shape)
                self.slots[node] = Slot(slot)
            elif node in self.live:
                self.slots[node] = self.tensor_leaf(node, spec, node in written)

    def tensor_leaf(self, node: torch.fx.Node, spec: Any, written: bool) -> Slot:
        """A parameter, a buffer (state when it is written), or a tensor constant."""
        target = str(spec.target)
        if spec.kind == InputKind.PARAMETER:
            if written:
                self.problems.add(node, f"the parameter {target} is written in forward")
            return Slot(self.stored(node, target))
        if spec.kind == InputKind.BUFFER and written:
            return self.state(node, target)
        if spec.kind == InputKind.BUFFER and spec.persistent:
            return Slot(self.stored(node, target))
        table = self.program.constants if target in self.program.constants else None
        tensor = self.program.state_dict[target] if table is None else table[target]
        return Slot(self.fixed(target, tensor))

    def stored(self, node: torch.fx.Node, target: str) -> Value:
        return self.leaf(target.removeprefix(self.prefix), type_of(node.meta["val"]))

    def fixed(self, target: str, tensor: torch.Tensor) -> Value:
        """A tensor that the checkpoint does not hold: a constant, or a param when it is large."""
        array = tensor.detach().to("cpu")
        type_ = type_of(array)
        if array.numel() <= INLINE_ELEMENTS:
            number = array.to(torch.float32) if type_.dtype.is_float else array
            return constant(number.numpy(), type_.dtype.numpy)
        name = target.removeprefix(self.prefix)
        self.extra[name] = array
        return param(name, type_)

    def state(self, node: torch.fx.Node, target: str) -> Slot:
        value = self.program.state_dict.get(target, self.program.constants.get(target))
        if value is not None and value.count_nonzero():
            self.problems.add(
                node,
                f"the buffer {target} is written but does not start at zero; reset it before "
                "importing",
            )
        type_ = type_of(node.meta["val"])
        name = target.removeprefix(self.prefix)
        slot = Slot(emit("state", name=name, dtype=type_.dtype, shape=type_.shape))
        self.states[name] = slot
        return slot

    def logits(self, results: list[Any]) -> Value:
        value = results[0] if results else None
        if len(results) != 1 or not isinstance(value, Value):
            raise UnsupportedError(f"{self.name}: the module must return logits, one tensor")
        rows = value.shape[:-1]
        static = isinstance(value.shape[-1], int) if value.shape else False
        if rows not in ((TOKENS,), (1, TOKENS)) or value.dtype != DType.F32 or not static:
            raise UnsupportedError(
                f"{self.name}: the result {value.type} is not logits [1, T, vocab] or [T, vocab] "
                "of every token"
            )
        if value.type.rank == 3:
            return value
        return emit("reshape", value, shape=(1, TOKENS, value.shape[-1]))

    # --- nodes ---------------------------------------------------------------------------------

    def body(self, graph: torch.fx.Graph) -> list[Any]:
        results: list[Any] = []
        for node in graph.nodes:
            if node not in self.live or node.op == "placeholder":
                continue
            if node.op == "output":
                results = [self.read(n) for n in node.args[0] if isinstance(n, torch.fx.Node)]
            elif node.op == "get_attr":
                self.slots[node] = self.attribute(node)
            else:
                self.call(node)
        return results

    def attribute(self, node: torch.fx.Node) -> Any:
        owner: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            owner = getattr(owner, part)
        if isinstance(owner, torch.Tensor):
            return Slot(self.fixed(str(node.target), owner))
        return owner

    def read(self, node: torch.fx.Node) -> Any:
        slot = self.slots.get(node)
        if isinstance(slot, Slot):
            return slot.read()
        return [s.read() for s in slot] if isinstance(slot, list) else slot

    def argument(self, value: Any) -> Any:
        """An FX argument as table functions want it: values, sizes, lists of them, or itself."""
        if isinstance(value, (list, tuple)):
            return [self.argument(v) for v in value]
        if not isinstance(value, torch.fx.Node):
            return value
        meta = value.meta.get("val")
        if isinstance(meta, (torch.SymInt, int)):
            return size_of(meta)
        if isinstance(meta, (torch.SymFloat, torch.SymBool)):
            raise NoMapping("a number that depends on the number of tokens")
        return self.read(value)

    def call(self, node: torch.fx.Node) -> None:
        """Convert one node, or note why it can't be."""
        if any(self.slots.get(n, self) is None for n in node.all_input_nodes):
            # an operand failed and is reported; what is unknown by its name is too
            self.slots[node] = None
            if self.handler(node) is None and not self.is_plumbing(node):
                self.problems.add(node, _UNKNOWN)
            return
        meta = node.meta.get("val")
        if isinstance(meta, (torch.SymInt, torch.SymBool, torch.SymFloat, int, bool)):
            return
        try:
            self.slots[node] = self.convert(node)
        except NoMapping as error:
            self.problems.add(node, str(error))
            self.slots[node] = None
        except (GraphError, TypeError, AssertionError) as error:
            self.problems.add(node, f"with these arguments: {error}")
            self.slots[node] = None

    def convert(self, node: torch.fx.Node) -> Any:
        if node.target is operator.getitem:
            return self.slots[node.args[0]][node.args[1]]
        if self.is_plumbing(node):
            return self.region(node)
        handler = self.handler(node)
        if handler is None:
            raise NoMapping(_UNKNOWN)
        written = mutated(node)
        args = [self.argument(a) for a in node.args]
        kwargs = {k: self.argument(v) for k, v in node.kwargs.items() if k not in _IGNORED}
        builder = self.builder(node)
        if written is not None:
            result = self.applied(handler, builder, args, kwargs)
            self.slots[written].write(self.checked(node, builder, result))
            return self.slots[written]
        if self.mutating and may_be_view(node) and shares_memory(node):
            return self.view(node, handler, builder, args, kwargs)
        result = self.applied(handler, builder, args, kwargs)
        if isinstance(result, (tuple, list)) and not isinstance(result, Complex):
            outs = zip(result, builder.outs, strict=True)
            return [Slot(_checked(node, value, out)) for value, out in outs]
        return Slot(self.checked(node, builder, result))

    def handler(self, node: torch.fx.Node) -> Handler | None:
        """The table's function for a node; `mul_` is `mul`."""
        name = str(node.target)
        base, _, overload = name.rpartition(".")
        in_place = mutated(node) is not None
        return TABLE.get(f"{base.removesuffix('_')}.{overload}" if in_place else name)

    def is_plumbing(self, node: torch.fx.Node) -> bool:
        """Whether a node only picks a result or holds an inner graph."""
        return node.target is operator.getitem or region_of(node) is not None

    def builder(self, node: torch.fx.Node) -> Builder:
        meta = node.meta["val"]
        values = meta if isinstance(meta, (list, tuple)) else [meta]
        outs = tuple(type_of(v) for v in values)
        where = location(node, self.prefix)
        return Builder(where, outs, self.positions, self.sequence_length, self.next_layer)

    def applied(self, handler: Handler, b: Builder, args: list[Any], kwargs: dict) -> Any:
        """The handler's result; a complex operand goes through a view part by part."""
        complex_ = [i for i, a in enumerate(args) if isinstance(a, Complex)]
        if not complex_ or handler.__module__ != aten_views.__name__ or "real" in handler.__name__:
            return handler(b, *args, **kwargs)
        if complex_ != [0] or handler.__name__ in ("_imag",):
            return handler(b, *args, **kwargs)
        return Complex(*(handler(b, part, *args[1:], **kwargs) for part in args[0]))

    def checked(self, node: torch.fx.Node, b: Builder, value: Any) -> Any:
        return _checked(node, value, b.out)

    def sequence_length(self) -> Value:
        if self.length is None:
            self.length = emit("input", name="sequence_length", dtype=DType.I64, shape=())
        return self.length

    def next_layer(self) -> int:
        self.layers += 1
        return self.layers - 1

    # --- views and regions ---------------------------------------------------------------------

    def view(
        self, node: torch.fx.Node, handler: Handler, b: Builder, args: list[Any], kwargs: dict
    ) -> Any:
        parent = self.slots[node.args[0]]
        rest = args[1:]

        def forward(source: Any) -> Any:
            return self.applied(handler, b, [source, *rest], kwargs)

        if len(b.outs) > 1 or isinstance(node.meta["val"], (list, tuple)):
            if ".unbind" in str(node.target):
                return [Slot(v) for v in forward(parent.read())]
            dim = kwargs.get("dim", rest[1] if len(rest) > 1 else 0)
            return [self.part(parent, forward, b, i, dim) for i in range(len(b.outs))]
        back = VIEWS[str(node.target)]

        def inverse(source: Any, new: Any) -> Any:
            return back(b, source, new, *rest, **kwargs)

        slot = Slot(parent=parent, forward=forward, inverse=inverse)
        self.checked(node, b, slot.read())
        return slot

    def part(
        self, parent: Slot, forward: Callable[[Any], Any], b: Builder, index: int, dim: int
    ) -> Slot:
        return Slot(
            parent=parent,
            forward=lambda source: forward(source)[index],
            inverse=lambda source, new: part_back(b, source, new, index, dim),
        )

    def region(self, node: torch.fx.Node) -> Any:
        """The ops of an inner graph that only sets a mode (no_grad, autocast)."""
        at = region_of(node)
        assert at is not None
        inner = self.slots[node.args[at]].graph
        operands = node.args[at + 1 :]
        holders = [n for n in inner.nodes if n.op == "placeholder"]
        for holder, given in zip(holders, operands, strict=True):
            self.slots[holder] = self.slots[given]
        self.live |= live_nodes(inner)
        return [Slot(v) for v in self.body(inner)]


# Keyword arguments of ATen ops that say nothing to a graph.
_IGNORED = frozenset({"layout", "device", "pin_memory", "memory_format", "non_blocking", "copy"})


def _checked(node: torch.fx.Node, value: Any, out: TensorType) -> Any:
    """The value, if it has the type that PyTorch says. A mismatch is a fault of the table."""
    for part in value if isinstance(value, Complex) else (value,):
        if part.type != out:
            raise NoMapping(f"its graph form is {part.type}, PyTorch says {out} (a Bessemer bug)")
    return value


def convert(
    program: torch.export.ExportedProgram,
    name: str,
    leaf: Callable[[str, TensorType], Value] = param,
    prefix: str = "",
) -> Converted:
    """The program as a graph: inputs ids and positions i64[1, T], output logits f32[1, T, V].

    leaf: the value of a parameter or persistent buffer, given its name and type.
    prefix: what the capture put before the names of the model's own modules.

    Raises:
        UnsupportedError: lists every op that has no graph form, with module path and source line.
    """
    return Converter(program, name, leaf, prefix).run()
