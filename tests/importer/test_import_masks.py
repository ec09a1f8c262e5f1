"""The window of each layer, as the mask says that transformers would build."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from bessemer.errors import UnsupportedError
from bessemer.importer import import_model
from bessemer.importer.masks import describe
from tests.importer.cases import TOLERANCE, difference, eager, run, tokens
from tests.tiny_models import _BASE, randomise


def test_causal_masks() -> None:
    assert describe(causal_mask_function).window == 0
    for window in (1, 2, 5, 4096, 100_000):
        found = describe(sliding_window_causal_mask_function(window))
        assert (found.window, found.refusal) == (window, "")


NEITHER = {
    "both_ways": bidirectional_mask_function,
    "both_ways_in_a_window": sliding_window_bidirectional_mask_function(5),
    "chunks": chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)),
    "none": sliding_window_causal_mask_function(0),
    "prefix": or_masks(causal_mask_function, lambda b, h, q, k: k < 3),
    "holes": and_masks(causal_mask_function, lambda b, h, q, k: (q - k) % 3 == 0),
}


@pytest.mark.parametrize("name", NEITHER)
def test_other_masks_are_refused(name: str) -> None:
    assert "neither causal" in describe(NEITHER[name]).refusal


def test_a_mask_that_needs_data() -> None:
    data = torch.zeros(1, 4)
    assert "depends on the data" in describe(lambda b, h, q, k: data[b, k] > 0).refusal


def other(model_type: str, **over: object) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**_BASE, "hidden_size": 64, **over})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.float().eval().requires_grad_(False)
    randomise(model)
    return model


MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("name", ["phimoe", "olmoe"])
def test_the_mask_wins_over_what_attention_is_told(name: str) -> None:
    """phimoe's window is in its mask only; olmoe tells a window that its mask does not have."""
    model = other(name, sliding_window=5, **MOE)
    found = import_model(model)
    windows = {n.attrs["window"] for n in found.graph if n.op == "attention"}
    assert windows == ({5} if name == "phimoe" else {0})
    ids = tokens(19)
    assert difference(run(found, ids), eager(model, ids)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "reason"),
    [("diffllama", r"\[0, 0, 1, 1, 2, 2\]"), ("xglm", "attention interface"), ("bloom", "ALiBi")],
)
def test_models_that_would_come_out_wrong(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        import_model(other(name))
