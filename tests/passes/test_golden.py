"""Every pass: graph text in, graph text out, and both compute the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from bessemer.graph import (
    DType,
    Env,
    Graph,
    evaluate,
    parse_graph,
    print_graph,
    topological,
    verify,
)
from bessemer.graph.dims import evaluate_size
from bessemer.passes import every_pass, pass_by_name

FOLDER = Path(__file__).parent.parent / "golden"
# f32 on both sides, sums and products in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
# Values of integer inputs stay below the sizes that the cases index by them.
LARGEST_ID = {"ids": 9, "experts": 3}


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}-{self.title}"


def cases() -> list[Case]:
    found = []
    for path in sorted(FOLDER.glob("*.txt")):
        for part in path.read_text(encoding="utf-8").split("// case: ")[1:]:
            title, _, graphs = part.partition("\n")
            before, _, after = graphs.partition("// becomes\n")
            found.append(Case(path.stem, title, before, after.rstrip() + "\n"))
    return found


CASES = cases()
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def test_every_pass_has_a_case():
    assert {c.name for c in CASES} == {p.name for p in every_pass()}


@each_case
def test_graph_in_graph_out(case):
    before = parse_graph(case.before)
    verify(before)
    after = pass_by_name(case.name).apply(before)
    verify(after)
    assert print_graph(after) == case.after


# The rows of a graph are selected once; every other pass may run again.
REPEATABLE = [c for c in CASES if c.name != "select_rows"]


@pytest.mark.parametrize("case", REPEATABLE, ids=str)
def test_a_second_run_changes_nothing_more(case):
    once = pass_by_name(case.name).apply(parse_graph(case.before))
    assert print_graph(pass_by_name(case.name).apply(once)) == print_graph(once)


def inputs_of(graph: Graph) -> dict[str, tuple[tuple, DType]]:
    nodes = [n for n in graph.nodes() if n.op == "input"]
    return {str(n.attrs["name"]): (n.types[0].shape, n.types[0].dtype) for n in nodes}


def draw(after: Graph, rows: int, at: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Inputs of one call with that many rows, the first of which is at position `at`."""
    data = {}
    for name, (shape, dtype) in inputs_of(after).items():
        sizes = [evaluate_size(s, {"T": rows, "R": max(1, rows - 1)}) for s in shape]
        if name == "positions":
            data[name] = np.arange(at, at + rows).reshape(sizes)
        elif name == "output_rows":
            data[name] = rng.permutation(rows)[: sizes[0]]
        elif dtype == DType.F32:
            data[name] = rng.standard_normal(sizes).astype(np.float32)
        else:
            data[name] = rng.integers(0, LARGEST_ID[name], sizes)
    return data


def random_params(*graphs: Graph, rng: np.random.Generator) -> Mapping[str, np.ndarray]:
    params: dict[str, np.ndarray] = {}
    for graph in graphs:
        for node in topological([*graph.roots, *graph.weights.values()]):
            if node.op == "param" and node.attrs["name"] not in graph.weights:
                shape = node.types[0].shape
                params[str(node.attrs["name"])] = rng.standard_normal(shape).astype(np.float32)
    return params


def evaluate_before(graph, data, params, env):
    """The graph before the pass takes the same numbers, perhaps with a batch axis."""
    wanted = inputs_of(graph)
    shaped = {
        n: data[n][None] if len(wanted[n][0]) == data[n].ndim + 1 else data[n] for n in wanted
    }
    return evaluate(graph, shaped, params.__getitem__, env)


ONE_ROW = ("specialize", "decode_attention")
CASES_AND_ROWS = [(c, n) for c in CASES for n in (1, 3) if n == 1 or c.name not in ONE_ROW]


@pytest.mark.parametrize(("case", "rows"), CASES_AND_ROWS, ids=str)
def test_both_compute_the_same_step_by_step(case, rows):
    before, after = parse_graph(case.before), parse_graph(case.after)
    rng = np.random.default_rng(7)
    params = random_params(before, after, rng=rng)
    old, new = Env(), Env()
    for at in (0, rows) if "state" not in before.op_counts() or rows == 1 else (0,):
        data = draw(after, rows, at, rng)
        if case.name == "specialize":
            data["output_rows"] = np.zeros(1, np.int64)
        expected = evaluate_before(before, data, params, old)
        actual = evaluate(after, data, params.__getitem__, new)
        for name, value in expected.items():
            picked = value[data["output_rows"]] if case.name == "select_rows" else value
            np.testing.assert_allclose(
                actual[name], picked.reshape(actual[name].shape), **TOLERANCE
            )


def update() -> None:
    """Rewrite what the cases become."""
    for path in sorted(FOLDER.glob("*.txt")):
        lines = []
        for case in [c for c in CASES if c.name == path.stem]:
            after = print_graph(pass_by_name(case.name).apply(parse_graph(case.before)))
            lines.append(f"// case: {case.title}\n{case.before}// becomes\n{after}")
        path.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    update()
