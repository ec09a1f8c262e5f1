"""Shared by the importer's tests: models imported once, and graphs run in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bessemer.graph import Env, Graph, evaluate
from bessemer.importer import Imported, import_model
from tests.tiny_models import VOCAB, tiny

# float32 on both sides, sums in another order; the tiny models' peaked attention amplifies it
TOLERANCE = 1e-5


@cache
def model(model_type: str) -> PreTrainedModel:
    return tiny(model_type)[1]


@cache
def imported(model_type: str, capture: str = "export") -> Imported:
    return import_model(model(model_type), capture=capture)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


def run(
    found: Imported,
    ids: Sequence[int],
    chunks: Sequence[int] = (),
    graph: Graph | None = None,
    env: Env | None = None,
) -> np.ndarray:
    """Logits [T, vocab] of the graph's NumPy reference, the prompt fed in chunks of these sizes
    (then the rest); `sequence_length` is that of all ids, as in a cold run. env: its state.
    """
    graph, env = graph or found.graph, env or Env()
    out, at = [], 0
    for count in [*chunks, len(ids) - sum(chunks)]:
        inputs: dict[str, Any] = {
            "ids": np.array([ids[at : at + count]]),
            "positions": np.arange(at, at + count)[None],
            "sequence_length": np.array(len(ids)),
        }
        out.append(evaluate(graph, inputs, found.checkpoint.read, env)["logits"][0])
        at += count
    return np.concatenate(out)


def eager(module: torch.nn.Module, ids: Sequence[int]) -> np.ndarray:
    """transformers' logits [T, vocab] of a full forward."""
    with torch.no_grad():
        return module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].numpy()


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Relative L2 error of a against b."""
    assert a.shape == b.shape
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
