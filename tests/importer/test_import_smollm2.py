"""The real model: SmolLM2-135M-Instruct from its GGUF."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.importer import import_model, reference_logits
from tests.importer.cases import difference, run


@pytest.mark.slow
def test_smollm2_equals_transformers() -> None:
    found = import_model("smollm2")
    assert (found.vocab_size, found.context_length, found.rope) == (49152, 8192, None)
    assert found.config["model_type"] == "llama"
    layers = [n.attrs["layer"] for n in found.graph if n.op == "attention"]
    assert layers == list(range(30))
    heads = [n for n in found.graph if n.op == "linear" and n.types[0].shape[-1] == 49152]
    assert [h.inputs[1].node.attrs["name"] for h in heads] == ["model.embed_tokens.weight"]  # tied
    ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47]
    expected = reference_logits(found)(ids)
    got = run(found, ids, chunks=(7, 1))
    assert difference(got, expected) < 1e-5
    assert np.array_equal(got.argmax(-1), expected.argmax(-1))
