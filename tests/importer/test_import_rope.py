"""Rotary frequencies: the tables in the graph, and those that depend on the length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bessemer.graph import Graph
from bessemer.importer import import_model, reference_logits
from tests.importer.cases import TOLERANCE, difference, eager, run, tokens
from tests.tiny_models import DYNAMIC_ROPE, LLAMA3_ROPE, LONG_ROPE, YARN_ROPE, tiny

LIMIT = 10


def frequencies(graph: Graph) -> np.ndarray:
    """The rotary table: the only vector constant."""
    (table,) = {
        tuple(n.attrs["value"].tolist())  # type: ignore[union-attr]
        for n in graph
        if n.op == "constant" and n.types[0].rank == 1
    }
    return np.array(table)


@pytest.mark.parametrize(
    "where", [{"rope_theta": 1e6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}]
)
def test_the_base_may_be_in_either_place(where: dict[str, Any]) -> None:
    """N08"""
    base = {"rope_parameters": None} if "rope_theta" in where else {}
    found = import_model(tiny("qwen2", head_dim=128, **{**base, **where})[1])
    assert frequencies(found.graph)[1] == pytest.approx(0.80584, abs=1e-5)


def test_llama3_scaling() -> None:
    """N09"""
    values = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
    table = frequencies(import_model(tiny("llama", head_dim=128, rope_parameters=values)[1]).graph)
    plain = 500000.0 ** (-np.arange(64) / 64)
    np.testing.assert_allclose(table[:29], plain[:29], rtol=1e-6)
    assert table[29] == pytest.approx(0.00216657, rel=1e-5)
    assert table[34] == pytest.approx(0.000178508, rel=1e-5)
    np.testing.assert_allclose(table[35:], plain[35:] / 8, rtol=1e-6)
    assert table[63] == pytest.approx(3.0689e-7, rel=1e-4)


@pytest.mark.parametrize(
    "values",
    [{"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}, YARN_ROPE],
    ids=["linear", "yarn"],
)
def test_scaled_tables(values: dict[str, Any]) -> None:
    _, model = tiny("llama", rope_parameters=values)
    found = import_model(model)
    assert found.rope is None
    ids = tokens(19)
    assert difference(run(found, ids), eager(model, ids)) < TOLERANCE
    plain = import_model(tiny("llama", rope_parameters={"rope_type": "default"})[1])
    assert difference(run(plain, ids), eager(model, ids)) > 1e-3


HALF_LONG = {
    **LONG_ROPE,
    "partial_rotary_factor": 0.5,
    "short_factor": LONG_ROPE["short_factor"][:4],
    "long_factor": LONG_ROPE["long_factor"][:4],
}
LONG = {"max_position_embeddings": 40, "original_max_position_embeddings": LIMIT}
BY_LENGTH = [
    ("phi3", "longrope", {"rope_parameters": LONG_ROPE, **LONG}),
    ("phi3", "longrope", {"rope_parameters": HALF_LONG, **LONG}),
    ("llama", "dynamic", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": LIMIT}),
    (
        "gemma3_text",
        "dynamic",
        {
            "max_position_embeddings": LIMIT,
            "rope_parameters": {
                "full_attention": DYNAMIC_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
]


@pytest.mark.parametrize("capture", ["export", "dynamo"])
@pytest.mark.parametrize(("name", "kind", "over"), BY_LENGTH)
def test_frequencies_by_length(name: str, kind: str, over: dict[str, Any], capture: str) -> None:
    found = import_model(tiny(name, **over)[1], capture=capture)
    assert found.rope == {"kind": kind, "threshold": LIMIT}
    reference = reference_logits(found)
    results = {}
    for count in (19, LIMIT + 1, LIMIT, 3):  # a longer one first: the reference must forget it
        ids = tokens(count)
        # transformers keeps the longest length that a model has seen: a fresh model each time
        expected = eager(tiny(name, **over)[1], ids)
        assert np.array_equal(reference(ids), expected)
        results[count] = run(found, ids)
        assert difference(results[count], expected) < TOLERANCE
    # the same rows as part of a longer sequence differ
    assert difference(results[LIMIT + 1][:LIMIT], run(found, tokens(LIMIT + 1)[:LIMIT])) > 1e-3
