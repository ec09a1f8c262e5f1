"""The size of a model: parameters, bytes by format and context, and what a token costs to read.

Of a model that is compiled or could be, or of a config alone. Everything is counted on the tables
that code generation makes: stored weights, the layout of the state, the work of each call. Of a
config the first layers are captured, some of each kind, and their tables spread over the rest:
weights and state are then those of the whole model, and scratch nearly so, since the places in it
are found by first fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from bessemer.artifact.layout import (
    PANEL_ROWS,
    ScratchLayout,
    StateLayout,
    StoredWeight,
    align,
    matrix_format,
)
from bessemer.artifact.work import GroupWork, Step, read_work
from bessemer.codegen.control import control_weights
from bessemer.codegen.hot import PANEL_OPERAND
from bessemer.compiler import Compilation
from bessemer.errors import ArtifactError, BessemerError
from bessemer.graph import Graph
from bessemer.inspect.memory import state_text
from bessemer.inspect.page import Page, columns, facts, heading, size_text
from bessemer.inspect.spread import Spread
from bessemer.inspect.subject import Subject
from bessemer.inspect.weights import TABLE_OPERAND, number_count, parameter_count
from bessemer.verify.reference import PREFILL_GRAPH
from bessemer.weight_formats import WEIGHT_FORMATS

# Contexts of the table, in tokens, besides the chosen one and the model's own: those below it.
CONTEXTS = (4096, 32768, 131072, 1 << 20)
DECODE = "forward_decode"
# Ops that read the weights of chosen experts, with the first operand that is a weight.
_EXPERT_OPERAND = {"expert_linear": 2}
GIGA = 1e9


@dataclass(frozen=True)
class Plan:
    """weights: where each lies, in the chosen format.  shares: weight -> the share of it that one
    decoded token reads, above 1 where it is read twice; 1 where it is not named.  experts: those
    that belong to routed experts.  exact: matrices that are f32 in every format.  work: of a decode
    step, for the bytes of the state.
    context_limit: the model's own.
    """

    weights: tuple[StoredWeight, ...]
    shares: Mapping[str, Fraction]
    experts: frozenset[str]
    exact: frozenset[str]
    state: StateLayout
    scratch: ScratchLayout
    work: tuple[GroupWork, ...]
    parameters: int
    context_limit: int

    @property
    def format(self) -> str:
        """The storage of the matrices."""
        return matrix_format(self.weights) or "f32"

    @property
    def active(self) -> int:
        """Parameters that work on a token: all but those of experts that are not chosen."""
        return self.parameters - sum(
            math.ceil(number_count(w) * (1 - self.shares.get(w.name, Fraction(1))))
            for w in self.weights
            if w.name in self.experts
        )

    def stored(self, dtype: str) -> list[StoredWeight]:
        """The weight table with the matrices in another format."""
        found, at = [], 0
        for w in self.weights:
            kind = dtype if w.layout == "panels" and w.name not in self.exact else w.dtype
            placed = StoredWeight.place(w.name, w.shape, kind, w.layout, at)
            at = placed.offset + placed.nbytes
            found.append(placed)
        return found

    def weight_bytes(self, dtype: str) -> int:
        """Size of the tensors of weights.bin."""
        last = self.stored(dtype)[-1:]
        return last[0].offset + last[0].nbytes if last else 0

    def read_bytes(self, dtype: str) -> int:
        """Bytes of weights that one decoded token reads."""
        return sum(
            math.ceil(w.nbytes * self.shares.get(w.name, Fraction(1))) for w in self.stored(dtype)
        )

    def state_bytes(self, context: int) -> int:
        """The state memory of a session of that context."""
        return replace(self.state, capacity=context).nbytes

    def state_read_bytes(self, context: int) -> int:
        """Bytes of the state that the last token of a full context reads."""
        step = Step(context - 1, 1)
        return sum(group.cache_bytes_of(step) for group in self.work)

    def contexts(self) -> list[int]:
        """Those of the table."""
        known = {c for c in CONTEXTS if c <= self.context_limit}
        return sorted({*known, self.state.capacity, self.context_limit})


# -- making one ------------------------------------------------------------------------------------


def plan_of(subject: Subject) -> Plan:
    """The plan of a subject. Raises ArtifactError when a compiled folder doesn't keep what it takes
    and BessemerError when the model can't be compiled.
    """
    if subject.artifact is not None:
        return _plan_of_artifact(subject)
    if subject.config_only:
        return _plan_of_config(subject)
    compilation = subject.compilation
    generated = compilation.generated
    graph = compilation.lowered.decode
    return Plan(
        tuple(generated.weights),
        *read_shares(graph),
        control_weights(graph),
        generated.state,
        generated.scratch,
        generated.work.entries[DECODE],
        parameter_count(graph),
        compilation.imported.context_length,
    )


def _plan_of_artifact(subject: Subject) -> Plan:
    artifact = subject.artifact
    assert artifact is not None
    manifest = artifact.manifest
    graph = subject.kept_graph(PREFILL_GRAPH)
    if graph is None:
        raise ArtifactError(f"{artifact.folder} keeps no {PREFILL_GRAPH}: compile the model again")
    limit = manifest.config.get("max_position_embeddings")
    return Plan(
        manifest.weights,
        *read_shares(graph),
        control_weights(graph),
        manifest.state,
        manifest.scratch,
        read_work(artifact.folder).entries[DECODE],
        parameter_count(graph),
        max(limit if isinstance(limit, int) else 0, manifest.context_length),
    )


def _plan_of_config(subject: Subject) -> Plan:
    from bessemer.compiler import generate_model
    from bessemer.importer.outline import outline

    found = outline(subject.source)
    compilation = generate_model(found.checkpoint, subject.options)
    spread = Spread(found.prefix, found.like)
    return spread_plan(compilation, spread, found.parameters)


def spread_plan(compilation: Compilation, spread: Spread, count: int) -> Plan:
    """The plan of a whole model of which the first layers are compiled. count: its parameters."""
    from bessemer.codegen.work import group_work

    generated = compilation.generated
    weights = spread.weights(generated.weights)
    graph = compilation.lowered.decode
    found, experts = read_shares(graph)
    layers = range(len(spread.like))
    names = {
        name: [name] if layer is None else [spread.renamed(name, i) for i in layers]
        for name in found
        for layer in [spread.layer_of(name)]
    }
    shares = {new: found[name] for name, all_ in names.items() for new in all_}

    def everywhere(few: frozenset[str]) -> frozenset[str]:
        return frozenset(new for name in few for new in names[name])

    calls = spread.calls(generated.entries[DECODE], generated.state)
    return Plan(
        tuple(weights),
        shares,
        everywhere(experts),
        everywhere(control_weights(graph)),
        spread.state(generated.state),
        generated.scratch,
        group_work(calls, generated.state),
        count,
        compilation.imported.context_length,
    )


def read_shares(graph: Graph) -> tuple[dict[str, Fraction], frozenset[str]]:
    """Weights of which a token reads a part alone, each with that share, and which of them belong
    to routed experts. Of a table a token reads a row, of experts the chosen ones.
    """
    shares: dict[str, Fraction] = {}
    experts: set[str] = set()
    for node in graph.nodes():
        for at, value in enumerate(node.inputs):
            if value.op != "param":
                continue
            name, whole = str(value.node.attrs["name"]), int(str((*value.shape, 1)[0]))
            share = Fraction(1)
            if node.op in PANEL_OPERAND and node.op in TABLE_OPERAND:
                whole = align(whole, PANEL_ROWS)
            if TABLE_OPERAND.get(node.op) == at:
                share = Fraction(1, max(1, whole))
            elif at >= _EXPERT_OPERAND.get(node.op, len(node.inputs)):
                share = Fraction(int(str(node.inputs[1].shape[-1])), whole)
                experts.add(name)
            shares[name] = shares.get(name, Fraction(0)) + share
    return shares, frozenset(experts)


# -- showing it ------------------------------------------------------------------------------------


def memory_page(subject: Subject, bandwidth: float | None) -> Page:
    """Stage `memory`. bandwidth: bytes that are read in a second; None: no speed is estimated."""
    from bessemer.inspect.memory import memory

    if not subject.config_only:
        page = memory(subject)
        try:
            plan = plan_of(subject)
        except BessemerError as error:
            return Page(page.text + heading("parameters") + f"not shown: {error}\n", page.data)
        text = page.text + size_sections(plan, bandwidth)
        return Page(text, {**page.data, **plan_data(plan, bandwidth)})
    plan = plan_of(subject)
    text = facts(
        [
            ("config", subject.name),
            ("architecture", _architecture(subject.source.config)),
            (
                "scratch",
                f"about {size_text(plan.scratch.shared_bytes)} shared, "
                f"{size_text(plan.scratch.thread_bytes)} a thread",
            ),
        ]
    )
    text += heading("state of a session") + state_text(plan.state)
    data = {
        "scratch": {"shared": plan.scratch.shared_bytes, "thread": plan.scratch.thread_bytes},
        "state": {
            "bytes": plan.state.nbytes,
            "kv_bytes_per_token": plan.state.kv_bytes_per_token(),
        },
        "weights_bytes": plan.weight_bytes(plan.format),
    }
    text += size_sections(plan, bandwidth)
    return Page(text, {**data, **plan_data(plan, bandwidth)})


def _architecture(stated: dict[str, Any]) -> str:
    """Of a config.json. What it doesn't state is transformers' default, and marked as such."""
    from bessemer.importer.skeleton import read_config

    config = read_config(stated)

    def size(name: str) -> str:
        names = (name, config.attribute_map.get(name, name))
        default = "" if any(n in stated for n in names) else " (transformers' default)"
        return f"{getattr(config, name, None)}{default}"

    parts = (f"{size('num_hidden_layers')} layers", f"hidden {size('hidden_size')}")
    return ", ".join([str(config.model_type), *parts])


def size_sections(plan: Plan, bandwidth: float | None) -> str:
    """Parameters, bytes by format, and bytes by context."""
    speed = "" if bandwidth is None else f" at {bandwidth / GIGA:.1f} GB/s"
    text = heading("parameters") + facts(
        [
            ("all", f"{plan.parameters:,}"),
            ("active for a token", f"{plan.active:,}"),
            ("context", f"{plan.context_limit:,} tokens at most"),
        ]
    )
    text += heading("weights by format") + _formats(plan, bandwidth, speed)
    text += heading("decoding by context, one session") + _contexts(plan, bandwidth, speed)
    if bandwidth is None:
        return text + "\nno speed is estimated without a bandwidth: give --bandwidth GB/S\n"
    note = (
        "\ntokens/s: what reading alone allows at the end of a full context, weights and state "
        "once a token; the measured speed is below it\n"
    )
    return text + note


def _formats(plan: Plan, bandwidth: float | None, speed: str) -> str:
    context = plan.state.capacity
    head = ["weights", "stored", "", "read by a token"]
    rows: list[list[object]] = [[*head, f"tokens/s{speed}"]]
    for dtype in WEIGHT_FORMATS:
        stored, read = plan.weight_bytes(dtype), plan.read_bytes(dtype)
        rate = _rate(plan, dtype, context, bandwidth)
        rows.append([dtype, f"{stored:,}", size_text(stored), size_text(read), rate])
    return columns(rows, right=(1, 2, 3, 4))


def _contexts(plan: Plan, bandwidth: float | None, speed: str) -> str:
    dtype = plan.format
    fixed = plan.weight_bytes(dtype) + plan.scratch.nbytes(1)
    head = ["context", "state", "read by a token", f"all, {dtype} weights"]
    rows: list[list[object]] = [[*head, f"tokens/s{speed}"]]
    for context in plan.contexts():
        held = plan.state_bytes(context)
        numbers = [held, plan.state_read_bytes(context), fixed + held]
        rate = _rate(plan, dtype, context, bandwidth)
        rows.append([f"{context:,}", *map(size_text, numbers), rate])
    return columns(rows, right=(0, 1, 2, 3, 4))


def _rate(plan: Plan, dtype: str, context: int, bandwidth: float | None) -> str:
    if bandwidth is None:
        return ""
    return f"{tokens_per_second(plan, dtype, context, bandwidth):.3g}"


def tokens_per_second(plan: Plan, dtype: str, context: int, bandwidth: float) -> float:
    """What reading at `bandwidth` bytes a second allows at the end of a full context."""
    return bandwidth / max(1, plan.read_bytes(dtype) + plan.state_read_bytes(context))


def plan_data(plan: Plan, bandwidth: float | None) -> dict[str, Any]:
    """The plan for programs; speeds are None without a bandwidth."""
    context = plan.state.capacity

    def rate(dtype: str, context: int) -> float | None:
        return None if bandwidth is None else tokens_per_second(plan, dtype, context, bandwidth)

    return {
        "parameters": plan.parameters,
        "active_parameters": plan.active,
        "context_limit": plan.context_limit,
        "bandwidth": bandwidth,
        "formats": {
            dtype: {
                "bytes": plan.weight_bytes(dtype),
                "read_bytes_per_token": plan.read_bytes(dtype),
                "tokens_per_second": rate(dtype, context),
            }
            for dtype in WEIGHT_FORMATS
        },
        "contexts": [
            {
                "context": c,
                "state_bytes": plan.state_bytes(c),
                "read_bytes_per_token": plan.state_read_bytes(c),
                "tokens_per_second": rate(plan.format, c),
            }
            for c in plan.contexts()
        ],
    }
