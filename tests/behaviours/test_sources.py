"""Everything that can be compiled: modules of one's own, model objects, folders, GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from bessemer.backend.link import compile_c, link_shared
from bessemer.backend.target import Target
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.errors import ArtifactError
from bessemer.runtime.model import Model
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


class Probabilities(torch.nn.Module):
    """Its logits come from no linear layer directly, so that there is no hidden state to give."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Plain()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(ids, positions).softmax(-1)


def test_a_module_that_does_not_end_in_a_linear_layer() -> None:
    module = seeded(Probabilities())
    model = build(module, context=CONTEXT, chunk=8)
    assert model.manifest.hidden_size == 0
    ids = module_ids(CONTEXT)
    assert error(stepwise(model.session(), ids, 5), eager(module, ids)) < F32_ERROR


def test_capture_by_dynamo_gives_the_same_code(tmp_path: Path) -> None:
    """The whole pipeline, not only the graph: equal libraries and weights."""
    torch_model = causal_lm("gemma2")
    ways = [build(torch_model, capture=way) for way in ("export", "dynamo")]
    one, other = (model.manifest for model in ways)
    assert one.files["model.so"] == other.files["model.so"]
    assert one.weights_digest == other.weights_digest
    ids = token_ids(33)
    got = [stepwise(model.session(), ids, 21) for model in ways]
    assert np.array_equal(*got)


def test_a_baseline_cpu_gives_the_same_numbers() -> None:
    torch_model = causal_lm("llama")
    baseline = build(torch_model, cpu="baseline")
    assert baseline.manifest.required_features == ()
    ids = token_ids(33)
    got = stepwise(baseline.session(), ids, 21)
    assert error(got, reference(torch_model, ids)) < F32_ERROR
    native = build(torch_model)
    assert native.manifest.required_features
    assert error(got, stepwise(native.session(), ids, 21)) < F32_ERROR


def test_two_prefixed_models_in_one_program(tmp_path: Path) -> None:
    """Linked into one library with one another: no symbol clashes, and each gives its logits."""
    target, found = Target.native(), []
    for name, model_type in (("one_", "llama"), ("two_", "gemma2")):
        torch_model = causal_lm(model_type)
        model = build(torch_model, prefix=name, context=32)
        assert model.manifest.entry_points["forward_decode"] == f"{name}_mlir_ciface_forward_decode"
        found.append((name, torch_model, model))
    headers = "".join(f'#include "{model.path / "model.h"}"\n' for _, _, model in found)
    calls = "".join(
        f"void *p_{name}(void) {{ return (void *)&{model.manifest.entry_points[entry]}; }}\n"
        for (name, _, model), entry in zip(
            found, ("forward_prefill", "forward_decode"), strict=True
        )
    )
    (tmp_path / "program.c").write_text(f"{headers}{calls}", encoding="utf-8")
    compile_c(tmp_path / "program.c", tmp_path / "program.o", target)
    archives = [model.path / "libmodel.a" for _, _, model in found]
    link_shared([tmp_path / "program.o", *archives], tmp_path / "program.so", target)
    ids = token_ids(20)
    for _, torch_model, model in found:
        got = stepwise(model.session(), ids, 12)
        assert error(got, reference(torch_model, ids)) < F32_ERROR


def test_another_machine(tmp_path: Path) -> None:
    """Assembly for it; here such a model is refused by name."""
    target = "riscv64" if Target.native().arch == "aarch64" else "aarch64"
    options = CompileOptions("f16", context=32, target=target, emit=("asm",))
    folder = compile_model(causal_lm("llama", num_hidden_layers=1), options, tmp_path / "model")
    text = (folder / "ir" / "forward_decode.s").read_text()
    assert "_mlir_ciface_forward_decode" in text
    groups = (folder / "ir" / "groups_decode.s").read_text()
    assert ("fmla" if target == "aarch64" else "fmadd") in groups
    with pytest.raises(ArtifactError, match=rf"compiled for {target}.*this machine is"):
        Model.load(folder)
