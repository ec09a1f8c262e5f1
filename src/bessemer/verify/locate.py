"""Where the first difference arises: from PyTorch, stage by stage, to the compiled library.

    PyTorch -> imported graph -> after each pass -> lowered graph -> compiled code -> the artifact

Graphs are run by their NumPy reference. The pass, or the op of the compiled code, that first leaves
the tolerance is found by bisection: what comes after it is wrong as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from bessemer.artifact.reader import Artifact
from bessemer.errors import CompileError
from bessemer.graph import DType, Env, Graph, Node, Value, evaluate
from bessemer.graph.dims import is_static
from bessemer.runtime.cpu import default_threads
from bessemer.runtime.engine import Engine
from bessemer.verify.compare import Logits, relative_l2
from bessemer.verify.rebuild import ProbeSession, build_engine, cut
from bessemer.verify.reference import Read, graph_inputs, run_graph
from bessemer.verify.report import STAGES, Outcome, Report

if TYPE_CHECKING:
    from bessemer.compiler import Compilation

_VIEWS = frozenset({"slice", "reshape", "param", "constant", "input", "state", "select_rows"})


@dataclass(frozen=True)
class Case:
    """The input on which numbers differ: all its ids, of which prefill calls take the first ones in
    pieces, and decode the `steps` last ones one by one.
    """

    ids: tuple[int, ...]
    pieces: tuple[int, ...]
    steps: int

    @property
    def prompt(self) -> int:
        return len(self.ids) - self.steps

    def calls(self) -> list[tuple[int, int]]:
        """Begin and end of each prefill call."""
        ends = np.cumsum(self.pieces).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))


@dataclass
class Locator:
    """Runs the stages on one case. read: checkpoint tensors as they are stored."""

    report: Report
    compilation: Compilation
    artifact: Artifact
    read: Read
    reference: Logits
    tolerance: float
    case: Case
    threads: int | None = None

    def run(self) -> None:
        """Add a check for every stage up to the first that is wrong, and one that names it."""
        case = self.case
        expected = np.asarray(self.reference(case.ids))
        imported = self.compilation.imported.graph
        if not self._stage(
            "imported graph", lambda: run_graph(imported, case.ids, self.read), expected
        ):
            self._found("the importer", "the imported graph computes something else than PyTorch")
            return
        lowered = self.compilation.lowered
        for name, graph in (("prefill", lowered.prefill), ("decode", lowered.decode)):
            if name == "decode" and not case.steps:
                continue
            if not self._stage(f"lowered {name}", partial(self._lowered, graph), expected):
                self._found(*self._first_pass(expected))
                return
        if self._stage("compiled again", self._compiled, expected):
            self._found(
                "the artifact",
                "compiling the model again gives the right numbers: its library was built from "
                "another source or another version; compile the model again",
            )
            return
        self._compiled_wrong(expected)

    def _compiled_wrong(self, expected: np.ndarray) -> None:
        threads = self.threads or default_threads()
        if threads > 1 and self._stage("one thread", lambda: self._compiled(threads=1), expected):
            self._found(
                "threads", f"wrong with {threads} of them and right with one: a barrier is missing"
            )
            return
        # Only to say whether the kernels or what they share is at fault: some ops have no generic
        # lowering.
        with contextlib.suppress(CompileError):
            generic = self._compiled(schedule="generic", threads=1)
            self._stage("generic lowering", lambda: generic, expected)
        self._found("compiled code", self._first_op())

    def _stage(self, name: str, logits: Callable[[], np.ndarray], expected: np.ndarray) -> bool:
        def compare() -> Outcome:
            error = relative_l2_rows(logits(), expected)
            return error <= self.tolerance, f"relative L2 {error:.1e} against the reference"

        return self.report.attempt(STAGES, name, compare)

    def _found(self, where: str, detail: str) -> None:
        self.report.add(STAGES, "first difference", False, f"{where}: {detail}")

    # -- graphs ------------------------------------------------------------------------------------

    def _lowered(self, graph: Graph) -> np.ndarray:
        """Rows of all tokens; the decode graph takes over after the prompt."""
        lowered = self.compilation.lowered
        if graph is lowered.prefill:
            return run_graph(graph, self.case.ids, self.read)
        return run_stepwise(lowered.prefill, graph, self.case, self.read)["logits"]

    def _first_pass(self, expected: np.ndarray) -> tuple[str, str]:
        """The first pass after which the graph computes something else."""
        steps = graphs_by_pass(self.compilation.imported.graph)

        def wrong(i: int) -> bool:
            logits = run_graph(steps[i][1], self.case.ids, self.read)
            return not relative_l2_rows(logits, expected) <= self.tolerance

        if not wrong(len(steps) - 1):
            return "a pass", "of the decode phase, which makes forward_decode of the same graph"
        name = steps[bisect(len(steps), wrong)][0]
        return f"pass {name}", "the graph after it computes something else than the one before"

    # -- compiled code -----------------------------------------------------------------------------

    def _compiled(self, schedule: str = "", threads: int | None = None) -> np.ndarray:
        lowered = self.compilation.lowered
        decode = lowered.decode if self.case.steps else None
        return self._run_parts(lowered.prefill, decode, schedule, threads)

    def _run_parts(
        self, prefill: Graph, decode: Graph | None, schedule: str, threads: int | None
    ) -> np.ndarray:
        engine = build_engine(
            self.compilation,
            prefill,
            decode,
            schedule or self.compilation.options.schedule,
            self.artifact,
            self.read,
            threads or self.threads or default_threads(),
        )
        return run_engine(engine, self.case)

    def _first_op(self) -> str:
        """The first op whose compiled result is not what its NumPy reference gives."""
        lowered = self.compilation.lowered
        found = probes(lowered.prefill)
        steps = probes(lowered.decode) if self.case.steps else found
        if len(found) != len(steps):
            return "prefill and decode differ too much to be cut at the same places"
        outputs = {f"v{i}": probe.value for i, probe in enumerate(found)}
        graph = replace(lowered.prefill, outputs=outputs, updates={})
        expected = evaluate(graph, graph_inputs(graph, self.case.ids, 0), self.read, Env())

        def error(i: int) -> float:
            decode = cut(lowered.decode, steps[i].value) if self.case.steps else None
            ours = self._run_parts(cut(lowered.prefill, found[i].value), decode, "", 1)
            return relative_l2_rows(ours, expected[f"v{i}"].reshape(ours.shape))

        at = first_wrong(found, lambda i: not error(i) <= self.tolerance)
        node = found[at].value.node
        where = f" of {node.loc}" if node.loc else ""
        before = f"; {found[at - 1].value.op} before it is right" if at else ""
        return (
            f"op {at + 1} of {len(found)}, {node.op}{where}, gives {found[at].value.type} with "
            f"relative L2 {error(at):.1e}{before}"
        )


def first_wrong(found: Sequence[Probe], wrong: Callable[[int], bool]) -> int:
    """The first wrong probe: bottlenecks by bisection, since all after a wrong one are wrong; then
    one by one what lies before it. The last one is known to be wrong.
    """
    necks = [i for i, probe in enumerate(found) if probe.is_bottleneck and i < len(found) - 1]
    necks.append(len(found) - 1)
    at = bisect(len(necks), lambda i: wrong(necks[i]))
    start = necks[at - 1] + 1 if at else 0
    return next((i for i in range(start, necks[at]) if wrong(i)), necks[at])


def relative_l2_rows(ours: np.ndarray, expected: np.ndarray) -> float:
    """The largest relative L2 error of a row; NaN where a row is not finite."""
    if ours.shape != expected.shape:
        raise ValueError(f"{ours.shape} is compared with {expected.shape}")
    return float(np.max([relative_l2(a, b) for a, b in zip(ours, expected, strict=True)]))


def bisect(count: int, wrong: Callable[[int], bool]) -> int:
    """The first index of [0, count) that is wrong, when all after it are, and the last one is."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        if wrong(middle):
            high = middle
        else:
            low = middle + 1
    return low


def graphs_by_pass(graph: Graph) -> list[tuple[str, Graph]]:
    """Name of each pass up to the prefill graph and the graph after it, in pipeline order."""
    from bessemer.passes.pipeline import PHASES, SHARED_PHASES, run_passes

    found = []
    for phase in (*SHARED_PHASES, "prefill"):
        for step in PHASES[phase]:
            graph = run_passes(graph, [step])
            found.append((f"{step.name} ({phase})", graph))
    return found


@dataclass(frozen=True)
class Probe:
    """A value at which a lowered graph can be cut. is_bottleneck: all that comes later depends on
    the token ids through it alone (the residual stream between two layers is one).
    """

    value: Value
    is_bottleneck: bool


def probes(graph: Graph) -> list[Probe]:
    """The float32 results with rows that depend on the token ids, in graph order."""
    order: list[Node] = []
    depends: set[Node] = set()
    for node in graph.nodes():
        is_ids = node.op == "input" and node.attrs["name"] == "ids"
        if is_ids or any(v.node in depends for v in node.inputs):
            depends.add(node)
            order.append(node)
    last = {node: i for i, node in enumerate(order)}
    for i, node in enumerate(order):
        last.update(dict.fromkeys((v.node for v in node.inputs if v.node in depends), i))
    found, reach = [], 0
    for i, node in enumerate(order):
        is_bottleneck = reach <= i and len(node.types) == 1
        reach = max(reach, last[node])
        if node.op not in _VIEWS:
            found += [Probe(v, is_bottleneck) for v in node.outputs if _has_rows(v)]
    return found


def _has_rows(value: Value) -> bool:
    type_ = value.type
    return type_.dtype == DType.F32 and type_.rank >= 2 and is_static(type_.shape[1:])


def run_engine(engine: Engine, case: Case) -> np.ndarray:
    """Rows of all tokens, fed as the case says."""
    session = ProbeSession(engine)
    rows = [session.prefill(case.ids[a:b], all_logits=True) for a, b in case.calls()]
    rows += [session.decode(token)[None] for token in case.ids[case.prompt :]]
    return np.concatenate(rows)


def run_stepwise(prefill: Graph, decode: Graph, case: Case, read: Read) -> dict[str, np.ndarray]:
    """Outputs, one row a token: the prompt through one graph, the rest through the other."""
    env = Env()
    rows = [
        evaluate(prefill, graph_inputs(prefill, case.ids[a:b], a), read, env)
        for a, b in case.calls()
    ]
    for i, token in enumerate(case.ids[case.prompt :]):
        inputs = graph_inputs(decode, [token], case.prompt + i)
        rows.append(evaluate(decode, inputs, read, env))
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
