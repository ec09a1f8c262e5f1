"""From the imported graph to the two graphs that code is generated for, top to bottom.

    import -> [CANONICALISE, RECOGNISE, MERGE, SELECT] -> PREFILL -> prefill
                                                       -> DECODE  -> decode

The graph is verified after every pass, and op counts before and after each are kept.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bessemer.errors import CompileError
from bessemer.graph import Graph, print_graph, verify
from bessemer.passes.activations import Activations
from bessemer.passes.base import Pass
from bessemer.passes.cancel_shuffles import CancelShuffles
from bessemer.passes.canonicalize_views import CanonicalizeViews
from bessemer.passes.classic_fusion import ClassicFusion
from bessemer.passes.common_subexpressions import CommonSubexpressions
from bessemer.passes.dead_code import DeadCode
from bessemer.passes.decode_attention import DecodeAttention
from bessemer.passes.drop_batch import DropBatch
from bessemer.passes.eliminate_transpose import EliminateTranspose
from bessemer.passes.fold_constants import FoldConstants
from bessemer.passes.fold_weights import FoldWeights
from bessemer.passes.fuse_epilogues import FuseEpilogues
from bessemer.passes.glu import Glu
from bessemer.passes.grouped_queries import GroupedQueries
from bessemer.passes.head_norms import HeadNorms
from bessemer.passes.head_rows import HeadRows
from bessemer.passes.layer_norm import LayerNorm
from bessemer.passes.merge_gate_up import MergeGateUp
from bessemer.passes.merge_qkv import MergeQkv
from bessemer.passes.moe import Moe
from bessemer.passes.prefill_attention import PrefillAttention
from bessemer.passes.rms_norm import RmsNorm
from bessemer.passes.rope import Rope
from bessemer.passes.select_rows import SelectRows
from bessemer.passes.sink_repeats import SinkRepeats
from bessemer.passes.sink_transposes import SinkTransposes
from bessemer.passes.sink_units import SinkUnits
from bessemer.passes.specialize import Specialize
from bessemer.passes.split_states import SplitStates

PHASES: dict[str, tuple[Pass, ...]] = {
    "canonicalise": (
        DeadCode(),
        DropBatch(),
        FoldConstants(),
        SinkRepeats(),
        CanonicalizeViews(),
        SinkTransposes(),
        SinkUnits(),
        FoldConstants(),
        CommonSubexpressions(),
    ),
    "recognise": (
        EliminateTranspose(),
        ClassicFusion(),
        Activations(),
        LayerNorm(),
        RmsNorm(),
        HeadNorms(),
        Rope(),
        SinkTransposes(),
        CommonSubexpressions(),
        GroupedQueries(),
        CancelShuffles(),
    ),
    "merge": (
        HeadRows(),
        MergeGateUp(),
        Glu(),
        FuseEpilogues(),
        MergeQkv(),
        Moe(),
        CanonicalizeViews(),
        SplitStates(),
    ),
    "select": (
        SelectRows(),
        FoldWeights(),
        CommonSubexpressions(),
    ),
    "prefill": (PrefillAttention(),),
    "decode": (
        Specialize(),
        CanonicalizeViews(),
        FoldConstants(),
        DecodeAttention(),
    ),
}
SHARED_PHASES = ("canonicalise", "recognise", "merge", "select")


@dataclass(frozen=True)
class PassOptions:
    """How to lower.

    without: names of passes to leave out (to look for the pass behind a wrong result).
    dump: keep the text of the graph after every pass.
    save_to: where the graph before a failing pass is saved; the system's temporary folder if None.
    """

    without: frozenset[str] = frozenset()
    dump: bool = False
    save_to: Path | None = None


@dataclass(frozen=True)
class PassRecord:
    """One pass that ran: op counts before and after, and the time it took."""

    name: str
    phase: str
    before: dict[str, int]
    after: dict[str, int]
    seconds: float

    @property
    def changed(self) -> dict[str, int]:
        """Difference of the counts of the ops that the pass added or removed."""
        ops = sorted({*self.before, *self.after})
        differences = {op: self.after.get(op, 0) - self.before.get(op, 0) for op in ops}
        return {op: d for op, d in differences.items() if d}


@dataclass(frozen=True)
class Lowered:
    """The graphs for many rows and for one, and how they came about.

    dumps: "NN-phase-pass" -> graph text, when asked for.
    """

    prefill: Graph
    decode: Graph
    trace: list[PassRecord] = field(default_factory=list)
    dumps: dict[str, str] = field(default_factory=dict)


OnPass = Callable[[PassRecord, Graph], None]


def lower(graph: Graph, *, options: PassOptions | None = None) -> Lowered:
    """Lower an imported graph. Raises CompileError that names the pass which failed."""
    options = options or PassOptions()
    trace: list[PassRecord] = []
    dumps: dict[str, str] = {}

    def on_pass(record: PassRecord, after: Graph) -> None:
        trace.append(record)
        if options.dump:
            dumps[f"{len(trace):02}-{record.phase}-{record.name}"] = print_graph(after)

    def run(start: Graph, phases: Sequence[str]) -> Graph:
        for phase in phases:
            start = run_passes(start, _chosen(phase, options), on_pass, phase, options.save_to)
        return start

    shared = run(graph, SHARED_PHASES)
    prefill = run(replace(shared, name="forward_prefill"), ("prefill",))
    decode = run(replace(shared, name="forward_decode"), ("decode",))
    return Lowered(prefill, decode, trace, dumps)


def _chosen(phase: str, options: PassOptions) -> list[Pass]:
    return [p for p in PHASES[phase] if p.name not in options.without]


def run_passes(
    graph: Graph,
    passes: Sequence[Pass],
    on_pass: OnPass | None = None,
    phase: str = "",
    save_to: Path | None = None,
) -> Graph:
    """Apply passes in order and verify after each. Raises CompileError that names the pass, says
    where the graph before it is saved, and how to run that pass on it alone.
    """
    before = graph.op_counts()
    for step in passes:
        start = time.perf_counter()
        try:
            after = step.apply(graph)
            verify(after)
        except Exception as error:
            raise _failure(step, graph, error, save_to) from error
        counts = after.op_counts()
        if on_pass is not None:
            seconds = time.perf_counter() - start
            on_pass(PassRecord(step.name, phase, before, counts, seconds), after)
        graph, before = after, counts
    return graph


def _failure(step: Pass, graph: Graph, error: Exception, save_to: Path | None) -> CompileError:
    folder = save_to or Path(tempfile.mkdtemp(prefix="bessemer-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"before-{step.name}.graph"
    path.write_text(print_graph(graph), encoding="utf-8")
    kind = type(error).__name__
    return CompileError(
        f"pass {step.name} failed on graph @{graph.name}: {kind}: {error}\n"
        f"The graph before it is in {path}; run the pass alone with\n"
        f"  python -m bessemer.passes {step.name} '{path}'"
    )


def every_pass() -> Iterator[Pass]:
    """One of each pass of the pipeline, in order of first use."""
    seen: set[str] = set()
    for passes in PHASES.values():
        for step in passes:
            if step.name not in seen:
                seen.add(step.name)
                yield step


def pass_by_name(name: str) -> Pass:
    """Raises KeyError."""
    return {p.name: p for p in every_pass()}[name]
