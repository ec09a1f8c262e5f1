"""Everything that can be compiled: modules of one's own, model objects, folders, GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.behaviours.models import build, causal_lm, stepwise
from tests.e2e.compiled import F32_ERROR, error, reference, token_ids
from tests.importer.modules import (
    CONTEXT,
    HEADS,
    HIDDEN,
    VOCAB,
    WIDTH,
    OwnCache,
    Plain,
    RankOne,
    seeded,
)


def module_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def eager(module: torch.nn.Module, ids: list[int], rank: int = 2) -> np.ndarray:
    """Logits of a full forward of a module that takes ids and positions."""
    tokens, places = torch.tensor(ids), torch.arange(len(ids))
    with torch.no_grad():
        if rank == 1:
            return module(tokens, places).numpy()
        return module(tokens[None], places[None])[0].numpy()


@pytest.mark.parametrize(("make", "rank"), [(Plain, 2), (RankOne, 1)])
def test_a_module_with_sdpa(make: Callable[[], torch.nn.Module], rank: int) -> None:
    """C02 too: exported with an example of 6 tokens, run at every length."""
    module = seeded(make())
    model = build(module, context=CONTEXT, chunk=8)
    assert model.context_length == CONTEXT
    for count in range(1, CONTEXT + 1):
        ids = module_ids(count)
        want = eager(module, ids, rank)
        assert error(model.session().prefill(ids, all_logits=True), want) < F32_ERROR, count
    assert error(stepwise(model.session(), ids, 3), want) < F32_ERROR


class Stacked(torch.nn.Module):
    """The keys and values of all layers in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, HIDDEN)
        self.places = torch.nn.Embedding(CONTEXT, HIDDEN)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(2))
        self.register_buffer("cache", torch.zeros(2, 2, HEADS, CONTEXT, WIDTH))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, at = self.tokens(ids) + self.places(positions), positions[0]
        hidden = torch.arange(CONTEXT) > at[:, None]
        for layer, qkv in enumerate(self.qkv):
            parts = qkv(x[0]).chunk(3, -1)
            q, k, v = (part.unflatten(-1, (HEADS, WIDTH)).transpose(0, 1) for part in parts)
            self.cache[layer, 0][:, at] = k
            self.cache[layer, 1][:, at] = v
            scores = q @ self.cache[layer, 0].transpose(-1, -2) * WIDTH**-0.5
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            x = x + (weights @ self.cache[layer, 1]).transpose(0, 1).flatten(-2)
        return torch.nn.functional.linear(x, self.tokens.weight)


CACHES: dict[str, tuple[Callable[[], torch.nn.Module], set[str]]] = {
    "index": (lambda: OwnCache("index"), {"k", "v", "seen"}),
    "copy": (lambda: OwnCache("copy"), {"k", "v", "seen"}),
    "half": (lambda: OwnCache("stacked"), {"k.1", "v.1", "seen"}),
    "layers": (Stacked, {"cache.0.0", "cache.0.1", "cache.1.0", "cache.1.1"}),
}


@pytest.mark.parametrize("name", CACHES)
def test_a_module_with_a_cache_of_its_own(name: str) -> None:
    """Its buffers become state: decoding equals a cold run, also after a rewind and in a fork."""
    make, states = CACHES[name]
    model = build(seeded(make()), context=CONTEXT, chunk=8)
    assert {state.name for state in model.manifest.state.named} == states
    ids = module_ids(CONTEXT)

    def cold(tokens: list[int]) -> np.ndarray:
        return eager(seeded(make()), tokens)

    session = model.session()
    assert error(stepwise(session, ids, 5), cold(ids)) < F32_ERROR
    assert error(model.session().prefill(ids, all_logits=True), cold(ids)) < F32_ERROR
    session.rewind(6)
    fork = session.fork()
    other = [*ids[:6], 3, 1, 4]
    assert error(session.prefill(other[6:]), cold(other)[-1]) < F32_ERROR
    assert error(fork.decode(9), cold([*ids[:6], 9])[-1]) < F32_ERROR
    assert error(fork.decode(2), cold([*ids[:6], 9, 2])[-1]) < F32_ERROR


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gpt_oss", "deepseek_v3"])
def test_a_sharded_folder(model_type: str, tmp_path: Path) -> None:
    torch_model = causal_lm(model_type)
    torch_model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ids = token_ids(33)
    model = build(tmp_path)
    assert error(stepwise(model.session(), ids, 21), reference(torch_model, ids)) < F32_ERROR


def test_a_model_object_is_left_alone() -> None:
    torch_model = causal_lm("qwen3").train()
    ids = token_ids(33)
    before = {name: value.clone() for name, value in torch_model.state_dict().items()}
    model = build(torch_model)
    assert torch_model.training
    assert all(torch.equal(v, before[k]) for k, v in torch_model.state_dict().items())
    want = reference(torch_model.eval(), ids)
    assert error(stepwise(model.session(), ids, 21), want) < F32_ERROR
