"""Code generation: a lowered model to MLIR modules, a weight table and a memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bessemer.artifact.layout import (
    STREAMS,
    CompressedStream,
    KVLayer,
    NamedState,
    ScratchLayout,
    SharedLayer,
    StateLayout,
    StoredWeight,
    align,
)
from bessemer.artifact.work import Work
from bessemer.codegen import kernels as _kernels  # noqa: F401  (registers them)
from bessemer.codegen.barriers import place_barriers, verify_barriers
from bessemer.codegen.control import CONTROL_FORMAT, control_weights
from bessemer.codegen.group import KERNELS, CodegenTarget, GroupSpec, emit_group
from bessemer.codegen.hot import PANEL_OPERAND, is_hot, is_stateful
from bessemer.codegen.main_graph import PlannedCall, emit_main_graph, plan_calls
from bessemer.codegen.memory import ArenaPlan, plan_arena
from bessemer.codegen.payload import emit_generic_group, emit_payload
from bessemer.codegen.program import Call, Planner, Program
from bessemer.codegen.work import group_work, profile_layout
from bessemer.graph.core import Graph, Node, Value
from bessemer.graph.dims import is_static
from bessemer.graph.schema import param


@dataclass(frozen=True)
class GenerateOptions:
    """weights, kv: storage formats.  context: tokens of a session.  schedule: "kernels", or
    "generic" to lower every op by its payload (the reference that kernels are tested against).
    profile: the code measures itself (see `artifact.work`).  keep: no two values share memory, so
    that each can be looked at after a call.  least_scratch: scratch memory is laid out at least so
    large, so that code for several processors can be given the same.
    """

    target: CodegenTarget
    weights: str
    kv: str
    context: int
    schedule: str = "kernels"
    profile: bool = False
    keep: bool = False
    least_scratch: ScratchLayout = field(default_factory=lambda: ScratchLayout(0, 0))


@dataclass(frozen=True)
class EntryPlan:
    """One entry point: its calls, their places in memory, and its functions."""

    program: Program
    calls: list[PlannedCall]
    arena: ArenaPlan
    functions: dict[str, GroupSpec]


@dataclass(frozen=True)
class Generated:
    """modules: MLIR text by file stem.  payloads: readable text of each distinct group.
    expressions: stored weight -> how to compute it from checkpoint tensors.  work: operations and
    bytes of each group.
    """

    modules: dict[str, str]
    payloads: dict[str, str]
    weights: list[StoredWeight]
    expressions: dict[str, Value]
    state: StateLayout
    scratch: ScratchLayout
    vocab_size: int
    hidden_size: int
    work: Work
    entries: dict[str, EntryPlan] = field(default_factory=dict)


def generate(prefill: Graph, decode: Graph, options: GenerateOptions) -> Generated:
    """MLIR of both entry points. The graphs are lowered ones: see `passes.pipeline`."""
    graphs = {"forward_prefill": prefill, "forward_decode": decode}
    weights, expressions = _weights(list(graphs.values()), options)
    state = _state_layout(prefill, options)
    generic = options.schedule == "generic"
    hot = is_stateful if generic else is_hot
    modules: dict[str, str] = {}
    payloads: dict[str, str] = {}
    thread_bytes = 0
    programs: dict[str, Program] = {}
    functions: dict[str, dict[str, GroupSpec]] = {}
    names: dict[str, list[str]] = {}
    for entry, graph in graphs.items():
        table = {w.name: w for w in weights}
        program = Planner(graph, entry, table, state, options.target, hot, generic).run()
        programs[entry] = program
        text, functions[entry], names[entry], scratch = _groups(program, options.target, payloads)
        modules[entry.replace("forward", "groups")] = text
        thread_bytes = max(thread_bytes, scratch)
    plans = {
        entry: plan_arena(program, options.target.chunk, share=not options.keep)
        for entry, program in programs.items()
    }
    shared = max(options.least_scratch.shared_bytes, *(plan.nbytes for plan in plans.values()))
    thread_bytes = max(options.least_scratch.thread_bytes, thread_bytes)
    profile = None
    if options.profile:
        profile = profile_layout(thread_bytes, [f for e in functions.values() for f in e])
        thread_bytes = profile.offset + profile.nbytes
    scratch_layout = ScratchLayout(align(shared), align(thread_bytes))
    entries: dict[str, EntryPlan] = {}
    for entry, program in programs.items():
        plan = plans[entry]
        flags = place_barriers(program, plan)
        verify_barriers(program, plan, flags)
        calls = plan_calls(program, plan, flags, names[entry], state.named_offsets())
        modules[entry] = emit_main_graph(program, calls, plan, scratch_layout, profile)
        entries[entry] = EntryPlan(program, calls, plan, functions[entry])
    vocab = prefill.outputs["logits"].shape[-1]
    hidden = prefill.outputs["hidden"].shape[-1] if "hidden" in prefill.outputs else 0
    assert isinstance(vocab, int)
    assert isinstance(hidden, int)
    work = Work({e: group_work(p.calls, state) for e, p in entries.items()}, profile)
    return Generated(
        modules, payloads, weights, expressions, state, scratch_layout, vocab, hidden, work, entries
    )


def _weights(
    graphs: list[Graph], options: GenerateOptions
) -> tuple[list[StoredWeight], dict[str, Value]]:
    """The weight table, in order of use, and the expression of each weight. Matrices of hot ops
    are panels in the chosen format, or in f32 (`control_weights`); everything else (norms, biases,
    tables) is plain f32.
    """
    exact = frozenset().union(*map(control_weights, graphs))
    nodes: dict[str, Node] = {}
    panels: set[str] = set()
    expressions: dict[str, Value] = {}
    for graph in graphs:
        for node in graph.nodes():
            if node.op == "param":
                name = str(node.attrs["name"])
                nodes.setdefault(name, node)
                plain = param(name, node.types[0])
                expressions.setdefault(name, graph.weights.get(name, plain))
            at = PANEL_OPERAND.get(node.op)
            if at is not None and node.inputs[at].op == "param":
                panels.add(str(node.inputs[at].node.attrs["name"]))
    weights: list[StoredWeight] = []
    offset = 0
    for name, node in nodes.items():
        shape = node.types[0].shape
        assert is_static(shape)
        sizes = tuple(int(str(s)) for s in shape)
        if name in panels:
            dtype, layout = CONTROL_FORMAT if name in exact else options.weights, "panels"
        else:
            dtype, layout = str(node.types[0].dtype), "plain"
        weight = StoredWeight.place(name, sizes, dtype, layout, offset)
        offset = weight.offset + weight.nbytes
        weights.append(weight)
    return weights, expressions


def _state_layout(graph: Graph, options: GenerateOptions) -> StateLayout:
    """KV layers of the attention ops in layer order, and the model's own mutated buffers."""
    layers: list[KVLayer] = []
    shared: list[SharedLayer] = []
    streams: list[CompressedStream] = []
    named: dict[str, NamedState] = {}

    def numbers(*sizes: object) -> list[int]:
        return [int(str(n)) for n in sizes]

    for node in graph.nodes():
        a = node.attrs
        if node.op == "flash_attention":
            k, v = node.inputs[1].shape, node.inputs[2].shape
            layers.append(KVLayer(*numbers(a["layer"], k[-2], k[-1], v[-1], a["window"])))
        if node.op == "compressed_attention":
            width = node.inputs[1].shape[-1]
            shared.append(SharedLayer(*numbers(a["layer"], width, a["window"])))
        if node.op == "block_compress":
            layer, width, rate = numbers(a["layer"], node.inputs[3].shape[-1], a["rate"])
            stream, overlap = str(a["stream"]), bool(a["overlap"])
            streams.append(CompressedStream(layer, stream, width, rate, overlap))
        if node.op == "state":
            name, type_ = str(a["name"]), node.types[0]
            shape = tuple(numbers(*type_.shape))
            given = name not in graph.updates
            named.setdefault(name, NamedState(name, str(type_.dtype), shape, given))
    return StateLayout(
        tuple(sorted(layers, key=lambda layer: layer.layer)),
        options.kv,
        options.context,
        options.target.chunk,
        named=tuple(named.values()),
        shared=tuple(sorted(shared, key=lambda layer: layer.layer)),
        streams=tuple(sorted(streams, key=lambda s: (s.layer, STREAMS.index(s.stream)))),
    )


def _groups(
    program: Program, target: CodegenTarget, payloads: dict[str, str]
) -> tuple[str, dict[str, GroupSpec], list[str], int]:
    """(module text, function -> spec, function of each call, thread scratch). Equal specs share."""
    suffix = program.name.removeprefix("forward_")
    by_spec: dict[GroupSpec, str] = {}
    texts: list[str] = []
    names: list[str] = []
    scratch = 0
    for call in program.calls:
        name = by_spec.get(call.spec)
        if name is None:
            kind = call.spec.kind
            same = sum(1 for spec in by_spec if spec.kind == kind)
            name = by_spec[call.spec] = f"{suffix}_{kind}_{same}"
            text, needed = _emit(name, call, target)
            if call.payload is not None:
                payloads[name] = emit_payload(name, call.payload)
            texts.append(text)
            scratch = max(scratch, needed)
        names.append(name)
    return _module(texts), {n: s for s, n in by_spec.items()}, names, scratch


def _emit(name: str, call: Call, target: CodegenTarget) -> tuple[str, int]:
    if call.payload is not None:
        group = emit_generic_group(
            name,
            call.payload,
            split_rows=call.split == "rows",
            chunk=target.chunk,
            operands=call.spec.operands,
        )
        return group.text, group.thread_scratch_bytes
    kernel = KERNELS[call.spec.kind]
    return emit_group(name, call.spec, target), kernel.thread_scratch(call.spec, target)


def _module(texts: list[str]) -> str:
    return "module {\n" + "".join(texts) + "}\n"


def group_table(entry: EntryPlan) -> list[Mapping[str, object]]:
    """Rows for `inspect groups`: function, kind, calls, split, barriers, reads, writes."""
    rows: dict[str, dict[str, object]] = {}
    for planned in entry.calls:
        call = planned.call
        row = rows.setdefault(
            planned.function,
            {
                "function": planned.function,
                "kind": call.spec.kind,
                "split": call.split,
                "calls": 0,
                "barriers": 0,
                "first": call.label,
                "reads": [o.type for o in call.spec.operands if o.role in ("in", "state")],
                "weights": [o.type for o in call.spec.operands if o.role == "weight"],
                "writes": [o.type for o in call.spec.operands if o.role == "out"],
            },
        )
        row["calls"] = int(str(row["calls"])) + 1
        row["barriers"] = int(str(row["barriers"])) + int(planned.barrier)
    return list(rows.values())
