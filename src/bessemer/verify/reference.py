"""What the compiled model is compared with, on the weights that the artifact stores.

PyTorch in float32 where the model can be had again; otherwise the NumPy reference of the graph that
the artifact keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bessemer.artifact.reader import Artifact
from bessemer.errors import ArtifactError
from bessemer.graph import Env, Graph, GraphError, Value, evaluate, param, parse_graph
from bessemer.verify.compare import Logits

if TYPE_CHECKING:
    from bessemer.importer.api import Imported

# Where an artifact keeps the graphs that it was made from.
IMPORTED_GRAPH = "graph/imported.graph"
PREFILL_GRAPH = "graph/forward_prefill.graph"

Read = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class Reference:
    """name: what it is, for the report.  logits: ids to float32 [T, vocab]."""

    name: str
    logits: Logits


@contextlib.contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Let PyTorch run with this many threads; None leaves it alone."""
    if threads is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def torch_reference(imported: Imported, read: Read) -> Reference:
    """PyTorch's eager float32 model with the tensors that `read` gives."""
    import torch

    from bessemer.importer.reference import reference_logits

    return Reference(
        f"PyTorch {torch.__version__} float32, eager attention", reference_logits(imported, read)
    )


def graph_reference(graph: Graph, read: Read) -> Reference:
    """The NumPy reference of an imported or lowered graph."""

    def logits(ids: Sequence[int]) -> np.ndarray:
        return run_graph(graph, ids, read)

    return Reference(f"the NumPy reference of graph @{graph.name}", logits)


def run_graph(graph: Graph, ids: Sequence[int], read: Read) -> np.ndarray:
    """Logits float32 [T, vocab] of a cold forward over `ids`, whatever stage the graph is of."""
    outputs = evaluate(graph, graph_inputs(graph, ids, 0), read, Env())
    logits = outputs["logits"]
    return logits.reshape(-1, logits.shape[-1])


def graph_inputs(graph: Graph, ids: Sequence[int], start: int) -> dict[str, np.ndarray]:
    """The inputs that a graph names, for the tokens `ids` at positions from `start`, with all rows
    wanted. Imported graphs have a batch of one before the tokens, lowered ones have not.
    """
    count = len(ids)
    values = {
        "ids": np.array(ids, np.int64),
        "positions": np.arange(start, start + count),
        "output_rows": np.arange(count),
        "sequence_length": np.array(start + count),
    }
    found = {}
    for node in graph.nodes():
        if node.op == "input":
            name = str(node.attrs["name"])
            found[name] = values[name].reshape(
                [1] * (node.types[0].rank - values[name].ndim) + list(values[name].shape)
            )
    return found


@dataclass(frozen=True)
class KeptGraphs:
    """The graphs inside an artifact, and how its stored weights are made of their params."""

    imported: Graph
    expressions: Mapping[str, Value]


def kept_graphs(artifact: Artifact) -> KeptGraphs:
    """Raises ArtifactError when the artifact keeps none, or they can't be read."""
    graphs = []
    for name in (IMPORTED_GRAPH, PREFILL_GRAPH):
        path = artifact.folder / name
        if not path.is_file():
            raise ArtifactError(f"{artifact.folder} keeps no {name}")
        try:
            graphs.append(parse_graph(path.read_text(encoding="utf-8")))
        except (GraphError, OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{path} can't be read: {error}") from None
    return KeptGraphs(graphs[0], weight_expressions(graphs[1:]))


def weight_expressions(graphs: Sequence[Graph]) -> dict[str, Value]:
    """Stored weight -> expression over checkpoint tensors, for all that lowered graphs use."""
    found: dict[str, Value] = {}
    for graph in graphs:
        for node in graph.nodes():
            if node.op == "param":
                name = str(node.attrs["name"])
                found.setdefault(name, graph.weights.get(name, param(name, node.types[0])))
    return found


def without_expressions(graph: Graph) -> Graph:
    """A lowered graph whose params are read as they are stored."""
    return replace(graph, weights={})


__all__ = [
    "IMPORTED_GRAPH",
    "PREFILL_GRAPH",
    "KeptGraphs",
    "Path",
    "Read",
    "Reference",
    "graph_inputs",
    "graph_reference",
    "kept_graphs",
    "run_graph",
    "torch_reference",
    "torch_threads",
    "weight_expressions",
    "without_expressions",
]
