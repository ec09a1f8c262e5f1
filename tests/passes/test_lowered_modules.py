"""Plain torch modules, lowered: learned positions, SDPA, caches of their own."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.importer import import_model
from bessemer.passes import lower
from tests.importer.cases import difference, run
from tests.importer.modules import OwnCache, Plain, RankOne, seeded
from tests.passes.models import logits_of_imported, logits_of_lowered

IDS = [3, 14, 15, 9, 26, 5, 1]
TOLERANCE = 1e-5


@pytest.mark.parametrize("module", [Plain, RankOne], ids=lambda m: m.__name__)
def test_plain_attention(module):
    found = import_model(seeded(module()))
    lowered = lower(found.graph)
    read = found.checkpoint.read
    expected = logits_of_lowered(lowered.prefill, read, [IDS])
    if module is Plain:
        assert difference(expected, run(found, IDS)) < TOLERANCE
    for graph, chunks in (
        (lowered.prefill, [IDS[:3], IDS[3:]]),
        (lowered.decode, [[i] for i in IDS]),
    ):
        assert difference(logits_of_lowered(graph, read, chunks), expected) < TOLERANCE
    counts = lowered.prefill.op_counts()
    assert counts["flash_attention"] == 2
    # q, k and v come as one layer from the module; both blocks add their residual, with GELU.
    assert counts["linear"] == 2 * 4 + 1
    assert {"add": counts["add"], "permute": counts.get("permute", 0)} == {"add": 1, "permute": 0}
    assert "gelu" not in counts


@pytest.mark.parametrize("style", ["index", "copy", "stacked"])
def test_a_cache_of_the_module_is_state(style):
    found = import_model(seeded(OwnCache(style)))
    lowered = lower(found.graph)
    read = found.checkpoint.read
    chunks = [IDS[:4], IDS[4:]]
    expected = logits_of_imported(found.graph, read, chunks)
    assert difference(logits_of_lowered(lowered.prefill, read, chunks), expected) < TOLERANCE
    stepwise = logits_of_lowered(lowered.decode, read, [[i] for i in IDS])
    assert difference(stepwise, expected) < TOLERANCE
    for graph in (lowered.prefill, lowered.decode):
        # Of the stacked ones only the half that is used is left.
        k, v = ("k.1", "v.1") if style == "stacked" else ("k", "v")
        assert sorted(graph.updates) == [k, "seen", v]
        states = {str(n.attrs["name"]): n.types[0] for n in graph.nodes() if n.op == "state"}
        assert all(graph.updates[name].type == kind for name, kind in states.items())
    assert np.isfinite(expected).all()
