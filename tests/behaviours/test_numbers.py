"""BEHAVIOURS, Numbers: compiled models whose numbers are hard, against transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from bessemer.errors import CheckpointError, GenerationError
from bessemer.importer import import_model
from bessemer.runtime.model import Model
from tests.behaviours.models import build, causal_lm, stepwise
from tests.e2e.compiled import F32_ERROR, error, reference, token_ids
from tests.tiny_models import LLAMA3_ROPE

# Relative L2 error with f16 keys and values, the weights being the very same (DESIGN, Proof).
F16_KV_ERROR = 2e-3


def check(model: Model, torch_model: PreTrainedModel, ids: list[int], limit: float) -> None:
    """Every row of a chunked prefill, and of decode steps after half of it, equals PyTorch's."""
    want = reference(torch_model, ids)
    assert error(model.session().prefill(ids, all_logits=True), want) < limit
    assert error(stepwise(model.session(), ids, len(ids) // 2), want) < limit


def rounded(model: PreTrainedModel, dtype: torch.dtype = torch.float16) -> PreTrainedModel:
    """The model with its parameters as that type keeps them, in float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype).to(torch.float32))
    return model


def test_n01_scores_beyond_f16() -> None:
    """Every element of q and k is 32 before rotation: a raw score of 131072 with f16 weights and
    an f16 cache.
    """
    model = causal_lm("llama", head_dim=128, attention_bias=True, num_hidden_layers=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.fill_(32.0 if name.endswith("bias") else 0.0)
    rounded(model)
    check(build(model, weights="f16", kv="f16"), model, token_ids(37), F16_KV_ERROR)


def test_n02_a_residual_beyond_f16() -> None:
    """down_proj gives 70000 with f16 weights: the residual stream and the sums stay in f32."""
    model = causal_lm("llama", num_hidden_layers=2)
    outputs: list[float] = []
    down = model.model.layers[0].mlp.down_proj
    hook = down.register_forward_hook(lambda m, i, o: outputs.append(float(o.abs().max())))
    ids = token_ids(37)
    reference(model, ids)
    with torch.no_grad():
        down.weight *= 70000 / outputs[-1]
    reference(rounded(model), ids)
    hook.remove()
    assert outputs[-1] == pytest.approx(70000, rel=1e-2)
    assert down.weight.abs().max() < 65504
    check(build(model, weights="f16", kv="f16"), model, ids, F16_KV_ERROR)


class Norm(torch.nn.Module):
    """Embedding, RMSNorm, identity."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 64)
        self.norm = torch.nn.RMSNorm(64, eps=1e-6)
        self.head = torch.nn.Linear(64, 64, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.table(ids)))


def test_n02_the_norm_of_a_row_of_300() -> None:
    module = Norm().eval().requires_grad_(False)
    module.table.weight.fill_(300.0)
    module.head.weight.copy_(torch.eye(64))
    session = build(module, weights="f16", kv="f16").session()
    np.testing.assert_allclose(session.prefill([0, 1, 2], all_logits=True), 1.0, rtol=1e-6)
    np.testing.assert_allclose(session.decode(3), 1.0, rtol=1e-6)


def test_n02_nan_is_an_error() -> None:
    """A NaN in the row of one token: an error that names the position, and the session lives."""
    model = causal_lm("llama", num_hidden_layers=1)
    model.model.embed_tokens.weight.data[9, 3] = torch.nan
    session = build(model, weights="f16", kv="f32").session()
    ids = [i for i in token_ids(30) if i != 9]
    want = stepwise(session, ids[:9], 1)
    session.rewind(0)
    session.prefill(ids[:5])
    with pytest.raises(GenerationError, match=r"NaN at position 7"):
        session.prefill([*ids[5:7], 9])
    with pytest.raises(GenerationError, match=r"NaN"):
        session.decode(9)
    assert session.tokens == ids[:5]
    # The cache still holds NaN beyond the position: it must not be read.
    assert error(session.decode(ids[5]), want[5]) < F32_ERROR
    assert error(session.prefill(ids[6:8]), want[7]) < F32_ERROR
    session.rewind(4)
    assert error(session.decode(ids[4]), want[4]) < F32_ERROR


def test_n06_a_window_that_is_not_used() -> None:
    """use_sliding_window false with sliding_window 8: as without a window, at every position."""
    ids = token_ids(16)
    off = causal_lm("qwen2", use_sliding_window=False, sliding_window=8)
    none = causal_lm("qwen2", use_sliding_window=False, sliding_window=None)
    check(build(off), none, ids, F32_ERROR)
    on = causal_lm("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    assert error(reference(on, ids)[8:], reference(none, ids)[8:]) > 1e-2


WINDOWED = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 4}
EXPLICIT = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("layer_types", "windows"), [(None, [0, 0, 4, 4]), (EXPLICIT, [4, 0, 0, 4])]
)
def test_n07_which_layers_are_windowed(layer_types: list[str] | None, windows: list[int]) -> None:
    model = causal_lm("qwen2", **WINDOWED, max_window_layers=2, layer_types=layer_types)
    compiled = build(model)
    assert [layer.window for layer in compiled.manifest.state.layers] == windows
    check(compiled, model, token_ids(37), F32_ERROR)


def test_n08_the_base_in_either_place() -> None:
    ids = token_ids(37)
    rope = {"rope_type": "default", "rope_theta": 1e6}
    over = {"head_dim": 128, "num_hidden_layers": 1}
    inside = causal_lm("llama", **over, rope_parameters=rope)
    top = causal_lm("llama", **over, rope_parameters=None, rope_theta=1e6)
    other = causal_lm("llama", **over, rope_parameters={**rope, "rope_theta": 1e4})
    want = reference(inside, ids)
    assert inside.model.rotary_emb.inv_freq[1].item() == pytest.approx(0.80584, abs=1e-5)
    for model in (inside, top):
        assert error(build(model).session().prefill(ids, all_logits=True), want) < F32_ERROR
    assert error(reference(other, ids), want) > 1e-2


def test_n08_a_missing_base_is_the_default_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = causal_lm("smollm3")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    import_model(tmp_path)
    assert "rope_theta" not in caplog.text
    config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(config))
    import_model(tmp_path)
    assert "no rope_theta; taking smollm3's default, 2e+06" in caplog.text


def test_n09_llama3_scaling() -> None:
    """The published case: base 5e5, factor 8, 1 and 4, original 8192, width 128."""
    rope = {**LLAMA3_ROPE, "original_max_position_embeddings": 8192}
    over = {"head_dim": 128, "num_hidden_layers": 1, "max_position_embeddings": 131072}
    model = causal_lm("llama", **over, rope_parameters=rope)
    table = model.model.rotary_emb.inv_freq.numpy()
    assert table[29] == pytest.approx(0.00216657, rel=1e-5)
    assert table[63] == pytest.approx(3.0689e-7, rel=1e-4)
    compiled = build(model, context=512)
    ids = token_ids(400)
    check(compiled, model, ids, F32_ERROR)
    plain = causal_lm("llama", **over, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert error(reference(plain, ids), reference(model, ids)) > 1e-3


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gemma3_text"])
def test_n13_norm_weights_keep_f32(model_type: str) -> None:
    """x*w, and Gemma's x*(1+w), with weights that f16 arithmetic would lose beside 1: w is kept,
    and 1+w is summed, in f32.
    """
    model = causal_lm(model_type)
    one = 0.0 if model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in rounded(model).named_parameters():
            if "norm" in name:
                parameter.copy_(one + torch.linspace(-4e-4, 4e-4, len(parameter)))
    compiled = build(model, weights="f16")
    ids = token_ids(20)
    check(compiled, model, ids, 2e-5)
    without = causal_lm(model_type)
    with torch.no_grad():
        for name, parameter in rounded(without).named_parameters():
            if "norm" in name:
                parameter.fill_(one)
    # What the check above must tell apart.
    assert error(reference(without, ids), reference(model, ids)) > 1e-4


def test_n15_positions_of_a_bf16_model() -> None:
    """Angles of position 257 and beyond are exact, though bf16 has no 257."""
    half = causal_lm("llama", num_hidden_layers=2).to(torch.bfloat16)
    wide = causal_lm("llama", num_hidden_layers=2)
    wide.load_state_dict({k: v.to(torch.float32) for k, v in half.state_dict().items()})
    compiled = build(half, weights="bf16", context=320, chunk=64)
    ids = token_ids(300)
    check(compiled, wide, ids, F32_ERROR)
    assert torch.tensor(257.0).to(torch.bfloat16).item() != 257.0


def test_n21_heads(tmp_path: Path) -> None:
    """Tied without a tensor of its own; untied with its own; untied and absent."""
    from safetensors.torch import load_file, save_file

    ids = token_ids(20)
    for tied in (True, False):
        model = causal_lm("llama", num_hidden_layers=1, tie_word_embeddings=tied)
        folder = tmp_path / f"tied-{tied}"
        model.save_pretrained(folder)
        held = load_file(folder / "model.safetensors")
        assert ("lm_head.weight" in held) == (not tied)
        compiled = build(folder)
        check(compiled, model, ids, F32_ERROR)
        matrices = [w for w in compiled.manifest.weights if w.shape == (97, 48)]
        assert len(matrices) == (1 if tied else 2)
    held.pop("lm_head.weight")
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        build(folder)


def test_n22_gemma3_past_its_window() -> None:
    model = causal_lm("gemma3_text", sliding_window=8, num_hidden_layers=3)
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    check(build(model), model, token_ids(20), F32_ERROR)
    wide = causal_lm("gemma3_text", sliding_window=64, num_hidden_layers=3)
    ids = token_ids(20)
    assert error(reference(wide, ids)[9:], reference(model, ids)[9:]) > 1e-2
