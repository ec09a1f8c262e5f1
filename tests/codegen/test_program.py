"""From a lowered graph to calls: grouping, sharing, the arena, barriers, the size of the IR."""

from __future__ import annotations

from functools import cache

import pytest

from bessemer.artifact.layout import matrix_format
from bessemer.codegen.barriers import place_barriers, verify_barriers
from bessemer.codegen.control import control_weights
from bessemer.codegen.generate import Generated, GenerateOptions, generate
from bessemer.codegen.group import CodegenTarget
from bessemer.codegen.memory import plan_arena
from bessemer.errors import CompileError
from bessemer.graph import Dim, DType, Graph, TensorType, Value, build, emit, param, verify
from bessemer.importer.api import import_model
from bessemer.passes.pipeline import lower
from tests.tiny_models import tiny

LAYERS = 8
# C03: the text of one entry point's modules, whatever the width of the model.
IR_BYTES = 2 << 20


@cache
def generated(model_type: str, layers: int = 3, hidden: int = 48) -> Generated:
    over = {"num_hidden_layers": layers, "hidden_size": hidden}
    imported = import_model(tiny(model_type, **over)[1])
    lowered = lower(imported.graph)
    target = CodegenTarget(lanes=8, registers=16, chunk=32, kv_dtype="f16")
    return generate(lowered.prefill, lowered.decode, GenerateOptions(target, "f16", "f16", 128))


def test_what_decides_stays_in_f32() -> None:
    weights = generated("deepseek_v3").weights
    exact = {w.name for w in weights if (w.layout, w.dtype) == ("panels", "f32")}
    assert exact == {f"model.layers.{i}.mlp.gate.weight" for i in (1, 2)}  # 0 has no experts
    assert matrix_format(weights) == "f16"
    assert matrix_format([w for w in weights if w.layout == "plain"]) is None


def test_only_what_leads_to_a_decision_decides() -> None:
    rows = Dim.sym("T")

    def weight(name: str, *shape: int) -> Value:
        return param(name, TensorType(DType.F32, shape))

    x = emit("input", name="x", dtype=DType.F32, shape=(rows, 8))
    data = emit("linear", x, weight("data", 8, 8))
    total = emit("reduce_sum", emit("linear", x, weight("total", 8, 8)), axes=(-1,), keepdims=True)
    scores = emit("softmax", emit("linear", emit("div", data, total), weight("router", 4, 8)))
    best = build("topk", [scores], k=2)
    each = emit("expert_linear", data, best.outputs[1], weight("experts", 4, 8, 8))
    factor = emit("mul", best.outputs[0], emit("sigmoid", emit("linear", x, weight("gate", 2, 8))))
    out = emit("mul", each, emit("reshape", factor, shape=(rows, 2, 1)))
    graph = Graph("g", {"logits": emit("reduce_sum", out, axes=(-2,))})
    verify(graph)
    assert control_weights(graph) == {"router", "gate"}


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "deepseek_v3"])
def test_live_buffers_are_apart(model_type: str) -> None:
    for entry in generated(model_type).entries.values():
        lives = entry.arena.lifetimes
        assert all(entry.arena.offsets[x.buffer] % 64 == 0 for x in lives)
        for i, a in enumerate(lives):
            for b in lives[:i]:
                if a.first <= b.last and b.first <= a.last:
                    at, bt = entry.arena.offsets[a.buffer], entry.arena.offsets[b.buffer]
                    assert at + a.nbytes <= bt or bt + b.nbytes <= at, (a, b)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "deepseek_v3"])
def test_every_barrier_is_needed_and_none_is_missing(model_type: str) -> None:
    """The checker accepts the placement and refuses it with any one barrier taken away."""
    for entry in generated(model_type).entries.values():
        flags = place_barriers(entry.program, entry.arena)
        verify_barriers(entry.program, entry.arena, flags)
        assert any(flags)
        for i, flag in enumerate(flags):
            if flag:
                without = [*flags[:i], False, *flags[i + 1 :]]
                with pytest.raises(CompileError, match="no barrier between"):
                    verify_barriers(entry.program, entry.arena, without)


def test_equal_layers_share_their_functions_and_loop() -> None:
    few, many = generated("llama", 4), generated("llama", LAYERS)
    for entry in ("forward_prefill", "forward_decode"):
        assert len(few.entries[entry].functions) == len(many.entries[entry].functions)
        assert len(many.entries[entry].calls) > len(few.entries[entry].calls)
        text, longer = few.modules[entry], many.modules[entry]
        assert "scf.for" in longer
        assert text.count("func.call") == longer.count("func.call"), "one more turn, no more calls"


def test_a_window_is_a_number_and_no_other_code() -> None:
    """Local and global layers of gemma2 are the same functions with other literals."""
    entry = generated("gemma2").entries["forward_prefill"]
    flash = [c for c in entry.calls if c.call.spec.kind == "flash_attention"]
    assert len(flash) == 3
    assert len({c.function for c in flash}) == 1
    assert {c.call.literals[1] for c in flash} == {0, 5}


def test_ir_does_not_grow_with_width_or_hold_weights() -> None:
    """C03."""
    narrow, wide = generated("llama", LAYERS, 48), generated("llama", LAYERS, 384)
    for stem, text in wide.modules.items():
        assert len(text) < IR_BYTES
        assert len(text) < 1.1 * len(narrow.modules[stem]) + 1000


def test_tied_head_and_embedding_are_one_weight() -> None:
    weights = {w.name for w in generated("gemma2").weights}
    assert "model.embed_tokens.weight" in weights
    assert not any("lm_head" in name for name in weights)


def test_weights_do_not_overlap() -> None:
    end = 0
    for weight in generated("deepseek_v3").weights:
        assert weight.offset >= end
        end = weight.offset + weight.nbytes


def test_the_arena_is_planned_for_a_whole_chunk() -> None:
    entry = generated("llama").entries["forward_prefill"]
    small, large = (plan_arena(entry.program, rows).nbytes for rows in (1, 32))
    assert large > 16 * small
    assert generated("llama").scratch.shared_bytes >= large
