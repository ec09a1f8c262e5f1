"""A graph as a sequence of group calls over buffers: what the main graph will do.

Nodes become groups (`clusters`), values become views of buffers (`views`); each call names its
operands by buffer and offset, so that equal groups differ only in numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bessemer.artifact.layout import CompressedStream, StateLayout, StoredWeight
from bessemer.codegen.clusters import Item, Partition, partition
from bessemer.codegen.group import KERNELS, CodegenTarget, GroupSpec, Operand
from bessemer.codegen.payload import PayloadSpec, emit_payload, row_wise
from bessemer.codegen.views import Buffer, View, element_of, view_through, whole
from bessemer.errors import CompileError
from bessemer.graph.core import Graph, Node, Value, topological
from bessemer.graph.dims import Dim, Size


@dataclass(frozen=True)
class Access:
    """One operand of a call: which memory, and how it lies in it."""

    view: View
    role: str  # "in", "out", "weight", "state"

    @property
    def operand(self) -> Operand:
        return self.view.operand(self.role)


@dataclass(frozen=True, eq=False)
class Call:
    """One group call. rows: the symbol or number of the rows it works on. literals: its numbers.
    split: how threads share it, see `group.Kernel`; "single" for one row. resources: state that it
    touches besides its buffers, as (name, writes).
    """

    spec: GroupSpec
    accesses: tuple[Access, ...]
    literals: tuple[int, ...]
    rows: Size
    label: str
    split: str
    payload: PayloadSpec | None = None
    resources: tuple[tuple[str, bool], ...] = ()


@dataclass(eq=False)
class Program:
    """The calls of one entry point, where its outputs end up, and where each value of the graph
    lies that a call reads or writes.
    """

    name: str
    calls: list[Call] = field(default_factory=list)
    hidden: View | None = None
    values: dict[Value, View] = field(default_factory=dict)

    def buffers(self) -> list[Buffer]:
        """Arena buffers in order of first use."""
        seen: dict[Buffer, None] = {}
        for call in self.calls:
            for access in call.accesses:
                if access.view.buffer.kind == "arena":
                    seen.setdefault(access.view.buffer)
        return list(seen)


Expander = Callable[["Planner", Node], None]
EXPANDERS: dict[str, Expander] = {}


def expands(*ops: str) -> Callable[[Expander], Expander]:
    """Registers how a hot op becomes calls."""

    def wrap(expander: Expander) -> Expander:
        EXPANDERS.update(dict.fromkeys(ops, expander))
        return expander

    return wrap


class Planner:
    """Builds a Program from a lowered graph."""

    def __init__(
        self,
        graph: Graph,
        name: str,
        weights: Mapping[str, StoredWeight],
        state: StateLayout,
        target: CodegenTarget,
        is_hot: Callable[[Node], bool],
        plain_attention: bool = False,
    ) -> None:
        self.graph = graph
        self.target = target
        self.state = state
        self.program = Program(name)
        self.plain_attention = plain_attention  # by the loops of payload.attention
        self._weights = weights
        self._views = self.program.values
        self._entries = {
            (entry.layer, entry.stream if isinstance(entry, CompressedStream) else ""): i
            for i, entry in enumerate(state.entries)
        }
        self._outputs = {v: k for k, v in graph.outputs.items()}
        self._uses = graph.uses()
        self._partition: Partition = partition(graph, is_hot)

    # --- memory ---------------------------------------------------------------------------------

    def read(self, value: Value) -> View:
        """Where a value lies; leaves and views are found on first use."""
        if value not in self._views:
            self._views[value] = self._locate(value)
        return self._views[value]

    def _locate(self, value: Value) -> View:
        node = value.node
        if node in self._partition.views:
            view = view_through(node, self.read(node.inputs[0]))
            if view is None:
                raise AssertionError(f"{node} is no view of its buffer")
            return view
        if node.op == "param":
            return self.weight(str(node.attrs["name"]))
        if node.op == "input":
            name = str(node.attrs["name"])
            return whole(Buffer(name, element_of(value), value.shape, "input"))
        if node.op == "state":
            name = str(node.attrs["name"])
            return whole(Buffer(name, element_of(value), value.shape, "state"))
        raise AssertionError(f"{node} is used before it is computed")

    def weight(self, name: str) -> View:
        stored = self._weights[name]
        buffer = Buffer(name, stored.dtype, stored.stored_shape, "weight", stored.offset)
        return whole(buffer)

    def write(self, value: Value) -> View:
        """A new buffer for a value: the call's output, or room in the arena."""
        kind = "output" if self._outputs.get(value) == "logits" else "arena"
        name = "logits" if kind == "output" else f"%{len(self._views)}"
        return self.place(value, whole(Buffer(name, element_of(value), value.shape, kind)))

    def place(self, value: Value, view: View) -> View:
        self._views[value] = view
        return view

    def temporary(self, name: str, shape: tuple[Size, ...], element: str = "f32") -> View:
        return whole(Buffer(name, element, shape, "arena"))

    def input(self, name: str, rows: Size) -> View:
        """An i64 input of the entry point that the graph does not mention (slots)."""
        return whole(Buffer(name, "i64", (rows,), "input"))

    def state_memory(self) -> View:
        """The session's whole state, as bytes; its size is not needed."""
        shape = (Dim.sym("state"),)
        return View(Buffer("state", "i8", shape, "session"), 0, shape, (1,))

    def entry(self, layer: int, stream: str = "") -> int:
        """Index in the state header of a layer's own entry, or of one of its compressed streams."""
        return self._entries[layer, stream]

    def compressed_rows(self, entry: int) -> int:
        """Rows that the compressed stream of an entry has room for."""
        stream = self.state.entries[entry]
        assert isinstance(stream, CompressedStream)
        return self.state.compressed_rows(stream)

    def last_use(self, value: Value, by: Node) -> bool:
        """Whether `by` is the only user of a value that is no output of the graph."""
        return value not in self._outputs and self._uses.get(value) == [by]

    # --- calls ----------------------------------------------------------------------------------

    def call(
        self,
        kind: str,
        accesses: list[tuple[View, str]],
        *,
        label: str,
        attrs: Mapping[str, object] | None = None,
        literals: Mapping[str, int] | None = None,
        resources: tuple[tuple[str, bool], ...] = (),
        payload: PayloadSpec | None = None,
        split: str | None = None,
        rows: Size | None = None,
    ) -> None:
        named = tuple(Access(view, role) for view, role in accesses)
        literals = literals or {}
        spec = GroupSpec(
            kind,
            tuple(a.operand for a in named),
            tuple(literals),
            tuple((attrs or {}).items()),
            emit_payload("group", payload) if payload else "",
        )
        if rows is None:  # those of the result
            rows = next((v.shape[0] for v, role in accesses if role == "out"), 1)
        split = split or KERNELS[kind].split
        if split == "rows" and rows == 1:
            split = "single"
        numbers = tuple(literals.values())
        self.program.calls.append(
            Call(spec, named, numbers, rows, label, split, payload, resources)
        )

    def run(self) -> Program:
        for item in self._partition.items:
            if item.hot:
                EXPANDERS[item.nodes[0].op](self, item.nodes[0])
            else:
                self._cluster(item)
        hidden = self.graph.outputs.get("hidden")
        if hidden is not None:
            self.program.hidden = self.read(hidden)
        return self.program

    def _cluster(self, item: Item) -> None:
        """The payload of a cluster: its nodes, the views between them, and what goes in and out."""
        inside = set(item.nodes)
        outputs = [v for n in item.nodes for v in n.outputs if self._escapes(v, inside)]
        nodes, inputs = self._payload_nodes(outputs, inside)
        updates = self._updates(outputs, inputs)
        spec = PayloadSpec(
            tuple(nodes),
            tuple(inputs),
            tuple(outputs),
            {v: self._weights[str(v.node.attrs["name"])] for v in inputs if v.node.op == "param"},
            updates,
        )
        written = set(updates.values())
        roles = {v: "weight" for v in inputs if v.op == "param"} | dict.fromkeys(written, "out")
        accesses = [(self.read(v), roles.get(v, "in")) for v in inputs]
        for value in outputs:
            if value in updates:
                self.place(value, self.read(updates[value]))
            else:
                accesses.append((self.write(value), "out"))
        rows = next((v.shape[0] for v in outputs if v.shape and isinstance(v.shape[0], Dim)), 1)
        split_rows = isinstance(rows, Dim) and not updates and row_wise(nodes, outputs)
        self.call(
            "generic",
            accesses,
            label=item.nodes[-1].loc.split(" ")[0],
            payload=spec,
            split="rows" if split_rows else "single",
            rows=rows,
        )

    def _updates(self, outputs: list[Value], inputs: list[Value]) -> dict[Value, Value]:
        """Outputs that replace a state -> that state. It is updated in place, so nobody else may
        still want what it held. Raises CompileError.
        """
        found: dict[Value, Value] = {}
        for name, value in self.graph.updates.items():
            if value not in outputs:
                continue
            held = [v for v in inputs if v.op == "state" and v.node.attrs["name"] == name]
            readers = [n for v in held for n in self._uses[v]]
            if len(readers) != 1:
                raise CompileError(
                    f"state {name!r} has {len(readers)} readers of its old value; it is updated in "
                    "place, so only the update itself may read it"
                )
            found[value] = held[0]
        return found

    def _escapes(self, value: Value, inside: set[Node]) -> bool:
        """Whether anything outside the cluster reads the value, directly or through views."""
        if value in self._outputs or value in self.graph.updates.values():
            return True
        stack = [value]
        while stack:
            current = stack.pop()
            for user in self._uses.get(current, []):
                if user in self._partition.views:
                    if user.out in self._outputs:
                        return True
                    stack.append(user.out)
                elif user not in inside:
                    return True
        return False

    def _payload_nodes(
        self, outputs: list[Value], inside: set[Node]
    ) -> tuple[list[Node], list[Value]]:
        """The cluster's nodes with the views and constants between them, and its inputs."""
        views = self._partition.views

        def inner(node: Node) -> bool:
            while node in views:
                node = node.inputs[0].node
            return node in inside or node.op == "constant"

        wanted: dict[Node, None] = {}
        inputs: dict[Value, None] = {}
        for node in topological(outputs):
            if node in inside or (node in views and inner(node)) or node.op == "constant":
                wanted.setdefault(node)
        needed: dict[Node, None] = {}
        stack = [v.node for v in outputs]
        while stack:
            node = stack.pop()
            if node in needed or node not in wanted:
                continue
            needed.setdefault(node)
            for value in node.inputs:
                if value.node in wanted:
                    stack.append(value.node)
        nodes = [n for n in wanted if n in needed]
        for node in nodes:
            for value in node.inputs:
                if value.node not in needed:
                    inputs.setdefault(value)
        return nodes, list(inputs)
