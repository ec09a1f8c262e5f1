"""Plans from a config alone: exact for models that can be compiled whole, and right for one of 284
billion parameters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bessemer.artifact.layout import CompressedStream, KVLayer, SharedLayer, StateLayout
from bessemer.artifact.work import GroupWork, Step
from bessemer.cli import main
from bessemer.compile_options import CompileOptions
from bessemer.compiler import generate_model
from bessemer.errors import CheckpointError, UsageError
from bessemer.importer.outline import ConfigCheckpoint, outline
from bessemer.inspect import inspect
from bessemer.inspect.memory import state_text
from bessemer.inspect.plan import DECODE, Plan, plan_of, size_sections
from bessemer.inspect.spread import Spread
from bessemer.inspect.subject import open_subject
from bessemer.inspect.weights import integer_tables, parameter_count
from bessemer.passes.pipeline import lower
from tests.importer.cases import imported, model
from tests.tiny_models import tiny_config

OPTIONS = CompileOptions(weights="f16", kv="f16", context=48, chunk=16)
SCRATCH_ERROR = 0.05

# The published config.json of DeepSeek V4 Flash: two layers of a window alone, then compression by
# 4 and by 128 in turns; the last ratio is that of the layer for speculative decoding. The values
# are those that rtp-llm's tests repeat from it; transformers' defaults and the schedule
# fixed in antirez/ds4 (even layers from 2 by 4, odd ones by 128) agree.
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-06,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8"},  # of the published weights, not of ours
}


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_file(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


# --- a plan is what compiling gives ---------------------------------------------------------------


# model type -> layers, and how many of them are captured
WHOLE = {"gemma3_text": (5, 4), "mixtral": (3, 2), "deepseek_v3": (4, 3)}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Plan]]:
    """A tiny model's config.json and the plan made of it, once for each kind."""

    @cache
    def make(kind: str) -> tuple[Path, Plan]:
        over: dict[str, Any] = {"num_hidden_layers": WHOLE[kind][0]}
        if kind == "gemma3_text":
            over["layer_types"] = [
                *["sliding_attention", "full_attention"] * 2,
                "sliding_attention",
            ]
        config = tiny_config(kind, **over).to_dict()
        path = config_file(tmp_path_factory.mktemp(kind), config)
        return path, plan_of(open_subject(path, options=OPTIONS))

    return make


@pytest.mark.parametrize("model_type", WHOLE)
def test_the_plan_of_a_config_is_that_of_the_whole_model(
    model_type: str, planned: Callable[[str], tuple[Path, Plan]]
) -> None:
    path, plan = planned(model_type)
    source = ConfigCheckpoint.of_file(path)
    assert outline(source).checkpoint.config["num_hidden_layers"] == WHOLE[model_type][1]
    whole = generate_model(source, OPTIONS).generated  # every layer
    assert list(plan.weights) == whole.weights
    assert plan.state == whole.state
    assert plan.scratch.thread_bytes == whole.scratch.thread_bytes
    # Places are found by first fit, which leaves other gaps among more layers.
    wanted = whole.scratch.shared_bytes
    assert plan.scratch.shared_bytes == pytest.approx(wanted, rel=SCRATCH_ERROR)
    assert plan.parameters == sum(math.prod(w.shape) for w in whole.weights)
    for context in (1, 7, 48):
        step = Step(context - 1, 1)
        assert plan.state_read_bytes(context) == whole.work.cache_bytes(DECODE, step)
    assert plan.read_bytes("f16") == whole.work.weight_bytes(DECODE, Step(0, 1))
    last = whole.weights[-1]
    assert plan.weight_bytes("f16") == last.offset + last.nbytes
    assert plan.contexts() == [48, 2048]  # the chosen one, and the model's own


def test_of_experts_the_chosen_ones_are_active(
    planned: Callable[[str], tuple[Path, Plan]],
) -> None:
    plan = planned("mixtral")[1]
    one = 3 * 48 * 56  # gate, up and down of an expert
    assert plan.parameters - plan.active == 3 * (4 - 2) * one


@pytest.mark.parametrize("name", ["deepseek_v4", "gemma2"])
def test_a_compiled_model_has_the_parameters_of_its_config(name: str, tmp_path: Path) -> None:
    """Folded factors, slices and merged matrices count as what they are made of, shared tensors
    once, and tables of experts' numbers not at all.
    """
    trained = {id(t): t for t in model(name).state_dict(keep_vars=True).values()}
    wanted = sum(t.numel() for t in trained.values() if t.is_floating_point())
    lowered = lower(imported(name).graph)
    assert parameter_count(lowered.decode) == parameter_count(lowered.prefill) == wanted
    config = ConfigCheckpoint(tmp_path, model(name).config.to_dict())
    assert outline(config).parameters == wanted
    tables = {"model.layers.0.mlp.gate.tid2eid"} if name == "deepseek_v4" else set()
    assert integer_tables(lowered.decode) == tables


# --- DeepSeek V4 Flash ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = config_file(tmp_path_factory.mktemp("flash"), FLASH)
    return plan_of(open_subject(path.parent, options=CompileOptions(context=1 << 20)))


def test_flash_has_284_billion_parameters_and_13_active(flash: Plan) -> None:
    expert = 3 * 4096 * 2048
    assert flash.parameters == 284_332_240_471
    assert flash.parameters - flash.active == 43 * (256 - 6) * expert
    assert flash.context_limit == 1 << 20
    matrices = flash.weight_bytes("f16")
    assert 2 * flash.parameters < matrices < 2.001 * flash.parameters
    # Routers and what mixes the streams are f32 in every format.
    exact = {re.sub(r"\d+", "N", name) for name in flash.exact}
    layer = "model.layers.N."
    wanted = ("attn_hc.fn", "ffn_hc.fn", "mlp.gate.weight")
    assert exact == {*(layer + name for name in wanted), "model.hc_head.hc_fn"}
    assert len(flash.exact) == 3 * 43 + 1
    assert {w.dtype for w in flash.stored("q8_0") if w.name in flash.exact} == {"f32"}
    # Of q8_0 a matrix of experts is read with its scales: 34 bytes for 32 numbers.
    assert flash.read_bytes("q8_0") == pytest.approx(flash.active * 34 / 32, rel=0.06)


def test_flash_keeps_compressed_rows_alone(flash: Plan) -> None:
    state = flash.state
    assert [layer.layer for layer in state.shared] == list(range(43))
    assert {(x.width, x.window) for x in state.shared} == {(512, 128)}
    assert state.layers == ()
    rates = {s.layer: s.rate for s in state.streams if s.stream == "kv"}
    assert rates == {i: 4 if i % 2 == 0 else 128 for i in range(2, 43)}
    assert {s.layer for s in state.streams if s.stream == "index"} == set(range(2, 43, 2))
    # A token adds 1/4 of a row of 512 and of an index row of 128 in 21 layers, and 1/128 in 20.
    wanted = 2 * (21 * Fraction(512 + 128, 4) + 20 * Fraction(512, 128))
    assert state.kv_bytes_per_token() == math.ceil(wanted)
    grown = flash.state_bytes(1 << 20) - flash.state_bytes(1 << 19)
    assert grown == wanted * (1 << 19)


def test_flash_in_words(flash: Plan) -> None:
    text = state_text(flash.state)
    for line in (
        r"0-42 +512 +128 +672 ",
        r"kv 2, 4, \.\.\. 42 +512 +4 +262144 ",
        r"kv 3, 5, \.\.\. 41 +512 +128 +8192 ",
        r"index 2, 4, \.\.\. 42 +128 +4 +262144 ",
    ):
        assert re.search(rf"^{line}", text, re.MULTILINE), line
    sizes = size_sections(flash, 50e9)
    assert re.search(r"^f16 .* 529\.81 GiB +24\.91 GiB +1\.\d+$", sizes, re.MULTILINE)
    for context in ("4,096", "32,768", "131,072", "1,048,576"):
        assert re.search(rf"^ *{context} ", sizes, re.MULTILINE)


def test_flash_reads_the_index_and_the_chosen_rows(flash: Plan) -> None:
    for context in (64, 4096, 1 << 20):
        index = 21 * (context // 4) * 128
        chosen = 21 * min(context // 4, 512) * 512
        heavy = 20 * (context // 128) * 512
        window = 43 * min(context, 128) * 512
        assert flash.state_read_bytes(context) == 2 * (index + chosen + heavy + window)


# --- parts ----------------------------------------------------------------------------------------


def test_a_model_is_spread_over_its_layers() -> None:
    spread = Spread("m.layers.", (0, 1, 0, 1, 1))
    names = ["embed", "m.layers.0.a", "table", "m.layers.0.b", "m.layers.1.a", "norm"]
    layers = [spread.layer_of(name) for name in names]
    assert layers == [None, 0, None, 0, 1, None]
    found = [
        name if layer is None else spread.renamed(name, layer)
        for name, layer in spread.over(names, layers)
    ]
    assert found == [
        "embed", "m.layers.0.a", "table", "m.layers.0.b", "m.layers.1.a", "m.layers.2.a",
        "m.layers.2.b", "m.layers.3.a", "m.layers.4.a", "norm",
    ]  # fmt: skip
    assert spread.layer_of("m.layers.10.a") == 10
    assert spread.layer_of("other.m.layers.1.a") is None
    state = StateLayout(
        (KVLayer(0, 1, 8, 8, 4),),
        "f16",
        64,
        16,
        shared=(SharedLayer(1, 8, 4),),
        streams=(CompressedStream(1, "kv", 8, 4, False), CompressedStream(1, "index", 4, 4, False)),
    )
    whole = spread.state(state)
    assert [x.layer for x in whole.layers] == [0, 2]
    assert [x.layer for x in whole.shared] == [1, 3, 4]
    assert [(x.layer, x.stream) for x in whole.streams[:3]] == [(1, "kv"), (1, "index"), (3, "kv")]
    assert replace(whole, layers=(), shared=(), streams=()) == replace(
        state, layers=(), shared=(), streams=()
    )


def test_layers_that_differ_in_the_config_alone_are_of_two_kinds(tmp_path: Path) -> None:
    local, whole = "sliding_attention", "full_attention"
    types = [local, local, whole, local, whole, local]
    config = tiny_config("gemma3_text", num_hidden_layers=6, layer_types=types).to_dict()
    # a list of another meaning that happens to have an entry for each captured layer
    config["architectures"] = [*"abcde"]
    found = outline(ConfigCheckpoint(tmp_path, config))
    assert found.like == (0, 0, 2, 0, 2, 0)
    assert found.checkpoint.config["num_hidden_layers"] == 5
    assert found.checkpoint.config["layer_types"] == types[:5]
    config["layer_types"] = [local, whole, *[local] * 4]
    found = outline(ConfigCheckpoint(tmp_path, config))
    assert found.like == (0, 1, 0, 0, 0, 0)
    assert found.checkpoint.config["num_hidden_layers"] == 3
    config["layer_types"] = [local] * 6
    found = outline(ConfigCheckpoint(tmp_path, config))
    assert found.like == (0,) * 6
    assert found.checkpoint.config["num_hidden_layers"] == 2


def test_compressed_rows_of_a_step() -> None:
    assert Step(7, 1).blocks(4, 0) == (2, 2)
    assert Step(6, 1).blocks(4, 0) == (1, 1)
    assert Step(0, 12).blocks(4, 0) == (4 * 1 + 4 * 2 + 3, 3)
    assert Step(0, 12).blocks(4, 2) == (4 * 1 + 5 * 2, 3)
    assert Step(4000, 1).blocks(4, 512) == (512, 512)
    work = GroupWork(
        "f", "k", 3, "1", key_flops=10, key_bytes=2, windows={8: 3}, blocks={"4/0": 2, "4/5": 1}
    )
    step = Step(99, 1)
    assert work.cache_bytes_of(step) == 2 * (3 * 8 + 2 * 25 + 5)
    assert work.flops_of(step) == 10 * (3 * 8 + 2 * 25 + 5)


# --- the command ----------------------------------------------------------------------------------


def test_the_command(
    planned: Callable[[str], tuple[Path, Plan]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, plan = planned("mixtral")
    monkeypatch.setattr("bessemer.inspect.plan.plan_of", lambda subject: plan)
    run = ["inspect", str(path.parent), "memory"]
    assert main([*run, "--bandwidth", "20", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["formats"]) == ["f32", "f16", "bf16", "q8_0"]
    assert [c["context"] for c in data["contexts"]] == [48, 2048]
    assert data["active_parameters"] < data["parameters"]
    f16 = data["formats"]["f16"]
    read = f16["read_bytes_per_token"] + data["contexts"][0]["read_bytes_per_token"]
    assert f16["tokens_per_second"] == pytest.approx(20e9 / read)
    assert data["state"]["bytes"] == data["contexts"][0]["state_bytes"]

    class Probes:
        def measure(self, threads: int) -> Any:
            return SimpleNamespace(bytes=7.5e9)

    monkeypatch.setattr("bessemer.bench.machine.Probes", Probes)
    assert main(run) == 0
    out = capsys.readouterr().out
    assert "tokens/s at 7.5 GB/s" in out
    for part in ("mixtral, 3 layers", "0-2", "weights by format", "decoding by context"):
        assert part in out


def test_wrong_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_file(tmp_path, {"model_type": "llama", "hidden_size": "wide"})
    assert main(["inspect", str(tmp_path), "memory", "--bandwidth", "1"]) == 1
    assert "config.json" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path), "memory", "--bandwidth", "0"]) == 2
    assert main(["inspect", str(tmp_path), "abi", "--bandwidth", "1"]) == 2
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        inspect(tmp_path, "memory")
    with pytest.raises(CheckpointError, match="without weights"):
        ConfigCheckpoint(tmp_path, {}).read("w")
    config_file(tmp_path, tiny_config("llama").to_dict())
    with pytest.raises(UsageError, match="at most 2048"):
        inspect(tmp_path, "memory", options=CompileOptions(context=4096))
