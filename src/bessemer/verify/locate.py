"""Where the first difference arises: from PyTorch, stage by stage, to the compiled library.

    PyTorch -> imported graph -> after each pass -> lowered graph -> compiled code -> the artifact

Graphs are run by their NumPy reference. The pass, or the op of the compiled code, that first leaves
the tolerance is found by bisection: what comes after it is wrong as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bessemer.artifact.reader import Artifact
from bessemer.graph import DType, Env, Graph, Value, evaluate
from bessemer.runtime.engine import Engine
from bessemer.runtime.session import Session
from bessemer.verify.compare import Logits, relative_l2
from bessemer.verify.rebuild import build_engine, cut
from bessemer.verify.reference import Read, graph_inputs, run_graph
from bessemer.verify.report import STAGES, Outcome, Report

if TYPE_CHECKING:
    from bessemer.compiler import Compilation

# Tokens that are looked at: NumPy is slow, and a wrong op shows in few.
MOST_TOKENS = 96
_VIEWS = frozenset({"slice", "reshape", "param", "constant", "input", "state", "select_rows"})


@dataclass(frozen=True)
class Case:
    """The input on which numbers differ. ids: of the prompt and then of `steps` decode steps."""

    ids: tuple[int, ...]
    steps: int

    @property
    def prompt(self) -> int:
        return len(self.ids) - self.steps

    def shortened(self) -> Case:
        steps = min(self.steps, MOST_TOKENS // 2)
        ids = self.ids[: max(MOST_TOKENS, 1)]
        return Case(ids, min(steps, len(ids) - 1))


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

    def run(self) -> None:
        """Add a check for every stage up to the first that is wrong, and one that names it."""
        case = self.case.shortened()
        expected = np.asarray(self.reference(case.ids))
        imported = self.compilation.imported.graph
        if not self._stage(
            "imported graph", lambda: run_graph(imported, case.ids, self.read), expected
        ):
            self._found("the importer", "the imported graph computes something else than PyTorch")
            return
        lowered = self.compilation.lowered
        for graph in (lowered.prefill, lowered.decode)[: 2 if case.steps else 1]:
            name = f"lowered graph @{graph.name}"
            if not self._stage(name, lambda g=graph: self._lowered(g, case), expected):
                self._found(*self._first_pass(case, expected))
                return
        for schedule in ("generic", "kernels"):
            name = f"compiled again, {schedule}"
            if not self._stage(name, lambda s=schedule: self._compiled(s, case), expected):
                self._found(*self._first_op(schedule, case))
                return
        self._found(
            "the artifact",
            "compiling the model again gives the right numbers: its library was built from "
            "another source or is damaged; compile the model again",
        )

    def _stage(self, name: str, logits: Callable[[], np.ndarray], expected: np.ndarray) -> bool:
        def compare() -> Outcome:
            error = relative_l2_rows(logits(), expected)
            return error <= self.tolerance, f"relative L2 {error:.1e} against the reference"

        return self.report.attempt(STAGES, name, compare)

    def _found(self, where: str, detail: str) -> None:
        self.report.add(STAGES, "first difference", False, f"{where}: {detail}")

    # -- graphs ------------------------------------------------------------------------------------

    def _lowered(self, graph: Graph, case: Case) -> np.ndarray:
        """Rows of all tokens; the decode graph takes over after the prompt."""
        if graph is self.compilation.lowered.prefill:
            return run_graph(graph, case.ids, self.read)
        return run_stepwise(self.compilation.lowered.prefill, graph, case, self.read)["logits"]

    def _first_pass(self, case: Case, expected: np.ndarray) -> tuple[str, str]:
        """The first pass after which the graph computes something else."""
        steps = list(graphs_by_pass(self.compilation.imported.graph, decode=False))

        def wrong(i: int) -> bool:
            logits = run_graph(steps[i][1], case.ids, self.read)
            return not relative_l2_rows(logits, expected) <= self.tolerance

        if not wrong(len(steps) - 1):
            return "a pass", "in the decode phase, which makes forward_decode of the same graph"
        name = steps[bisect(len(steps), wrong)][0]
        return f"pass {name}", "the graph after it computes something else than the one before"

    # -- compiled code -----------------------------------------------------------------------------

    def _compiled(self, schedule: str, case: Case) -> np.ndarray:
        lowered = self.compilation.lowered
        decode = lowered.decode if case.steps else None
        return self._run_parts(lowered.prefill, decode, schedule, case)

    def _run_parts(
        self, prefill: Graph, decode: Graph | None, schedule: str, case: Case
    ) -> np.ndarray:
        engine = build_engine(self.compilation, prefill, decode, schedule, self.artifact, self.read)
        return run_engine(engine, case)

    def _first_op(self, schedule: str, case: Case) -> tuple[str, str]:
        """The first op whose compiled result is not what its NumPy reference gives."""
        lowered = self.compilation.lowered
        values = candidates(lowered.prefill)
        steps = candidates(lowered.decode) if case.steps else values
        if len(values) != len(steps):
            return f"compiled code ({schedule})", "prefill and decode differ too much to be cut"
        probes = {f"v{i}": v for i, v in enumerate(values)}
        graph = replace(lowered.prefill, outputs=probes, updates={})
        expected = run_probes(graph, case, self.read)

        def error(i: int) -> float:
            decode = cut(lowered.decode, steps[i]) if case.steps else None
            ours = self._run_parts(cut(lowered.prefill, values[i]), decode, schedule, case)
            return relative_l2_rows(ours, expected[f"v{i}"])

        at = bisect(len(values), lambda i: not error(i) <= self.tolerance)
        node = values[at].node
        where = f" of {node.loc}" if node.loc else ""
        before = f"; {values[at - 1].op} before it is right" if at else ""
        return (
            f"compiled code ({schedule})",
            f"op {at + 1} of {len(values)}, {node.op}{where}, relative L2 {error(at):.1e}{before}",
        )


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


def graphs_by_pass(graph: Graph, *, decode: bool) -> Sequence[tuple[str, Graph]]:
    """Name of each pass and the graph after it, in the order of the pipeline."""
    from bessemer.passes.pipeline import PHASES, SHARED_PHASES, run_passes

    found = []
    for phase in (*SHARED_PHASES, "decode" if decode else "prefill"):
        for step in PHASES[phase]:
            graph = run_passes(graph, [step])
            found.append((f"{step.name} ({phase})", graph))
    return found


def candidates(graph: Graph) -> list[Value]:
    """Values at which a lowered graph can be cut: float32 matrices of rows that an op computes."""
    found = []
    for node in graph.nodes():
        if node.op in _VIEWS or len(node.types) != 1:
            continue
        type_ = node.types[0]
        if type_.dtype == DType.F32 and type_.rank == 2 and isinstance(type_.shape[1], int):
            found.append(node.out)
    return found


def run_engine(engine: Engine, case: Case) -> np.ndarray:
    """Rows of all tokens: the prompt by prefill, the rest by decode."""
    session = Session(engine)
    rows = [session.prefill(case.ids[: case.prompt], all_logits=True)]
    rows += [session.decode(token)[None] for token in case.ids[case.prompt :]]
    return np.concatenate(rows)


def run_probes(graph: Graph, case: Case, read: Read) -> dict[str, np.ndarray]:
    """All outputs of a lowered prefill graph over the whole case."""
    return evaluate(graph, graph_inputs(graph, case.ids, 0), read, Env())


def run_stepwise(prefill: Graph, decode: Graph, case: Case, read: Read) -> dict[str, np.ndarray]:
    """Outputs, one row a token: the prompt through one graph, the rest through the other."""
    env = Env()
    prompt = case.ids[: case.prompt]
    rows = [evaluate(prefill, graph_inputs(prefill, prompt, 0), read, env)]
    for i, token in enumerate(case.ids[case.prompt :]):
        inputs = graph_inputs(decode, [token], case.prompt + i)
        rows.append(evaluate(decode, inputs, read, env))
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
