"""Rotary frequencies: against the formulas of the ds4 engine, written out, and transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bessemer.errors import UnsupportedError
from bessemer.importer import definition_ops  # noqa: F401  (the ops)
from bessemer.importer.skeleton import read_config
from bessemer.models.rotary import (
    RotaryTables,
    correction_dimension,
    correction_range,
    inverse_frequencies,
    ramp,
)
from tests.tiny_models import tiny_config

# Those of DeepSeek V4 Flash.
WIDTH, BASE, COMPRESS_BASE, CONTEXT, FACTOR = 64, 10_000.0, 160_000.0, 65_536, 16.0
YARN = {
    "rope_type": "yarn",
    "rope_theta": COMPRESS_BASE,
    "factor": FACTOR,
    "original_max_position_embeddings": CONTEXT,
    "beta_fast": 32,
    "beta_slow": 1,
    "attention_factor": 1.0,
}


def engine_correction(width: int, context: int, turns: float, base: float) -> float:
    return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))


def engine_ramp(low: float, high: float, element: int) -> float:
    y = (element // 2 - low) / max(0.001, high - low)
    return 1.0 - min(1.0, max(0.0, y))


def engine_angles(position: int, base: float, scale: float, extended: bool) -> list[float]:
    """The angle of each pair: base ** (-2 / n) multiplied up, interpolated by the ramp."""
    low = math.floor(engine_correction(WIDTH, CONTEXT, 32, base))
    high = math.ceil(engine_correction(WIDTH, CONTEXT, 1, base))
    low, high = max(0, low), min(WIDTH - 1, high)
    angles = []
    for element in range(0, WIDTH, 2):
        whole = position * base ** (-2.0 / WIDTH * (element // 2))
        slow = scale * whole
        mix = engine_ramp(low, high, element) if extended else 0.0
        angles.append(slow * (1 - mix) + whole * mix)
    return angles


def test_correction_dimensions() -> None:
    for turns in (1, 32):
        want = engine_correction(WIDTH, CONTEXT, turns, COMPRESS_BASE)
        assert correction_dimension(WIDTH, CONTEXT, turns, COMPRESS_BASE) == want
        # There a pair turns so many times over the original context.
        turned = CONTEXT * COMPRESS_BASE ** (-2 * want / WIDTH) / (2 * math.pi)
        assert turned == pytest.approx(turns)
    assert correction_range(WIDTH, CONTEXT, COMPRESS_BASE, 32, 1) == (15, 25)
    assert correction_range(8, 4, 1e4, 32, 1) == (0, 0)  # all pairs are slow
    assert correction_range(8, 10**9, 2.0, 32, 1) == (
        math.floor(8 * math.log(1e9 / 64 / math.pi) / 2 / math.log(2)),
        7,
    )


def test_the_ramp() -> None:
    got = ramp(15, 25, WIDTH // 2).tolist()
    want = [engine_ramp(15, 25, element) for element in range(0, WIDTH, 2)]
    assert got == pytest.approx(want)
    assert got[:16] == [1.0] * 16
    assert got[25:] == [0.0] * 7
    assert got[20] == pytest.approx(0.5)
    assert ramp(3, 3, 6).tolist() == [1, 1, 1, 1, 0, 0]  # equal dimensions: a step


@pytest.mark.parametrize("position", [0, 1, 127, 65_535, 1_000_000])
def test_angles_are_those_of_the_engine(position: int) -> None:
    at = torch.tensor([[position]])
    for parameters, angles in (
        ({"rope_theta": BASE}, engine_angles(position, BASE, 1.0, False)),
        (YARN, engine_angles(position, COMPRESS_BASE, 1 / FACTOR, True)),
    ):
        cos, sin = RotaryTables(WIDTH, parameters)(at)
        # An angle of a million is held to 2^-4 in float32, and powers to a few units in the last.
        close = {"rel": 0, "abs": 1e-6 + position * 3e-7}
        assert cos[0, 0].tolist() == pytest.approx(np.cos(angles).tolist(), **close)
        assert sin[0, 0].tolist() == pytest.approx(np.sin(angles).tolist(), **close)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"factor": 4.0, "original_max_position_embeddings": 4096},
        {"beta_fast": 8, "beta_slow": 2},
        {"attention_factor": None},
        {"attention_factor": 1.5},
        {"factor": 1.0},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(change: dict) -> None:
    config = tiny_config("deepseek_v4", head_dim=WIDTH, partial_rotary_factor=1.0)
    parameters = {**YARN, **change, "partial_rotary_factor": 1.0}
    parameters = {k: v for k, v in parameters.items() if v is not None}
    config.rope_parameters = {"compress": parameters}
    want, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu", layer_type="compress")
    got, ours = inverse_frequencies(WIDTH, parameters)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert ours == pytest.approx(factor)


def test_each_kind_of_layer_has_its_base_and_scale() -> None:
    """By the published config: window layers plain, compressed ones with YaRN and no mscale."""
    config = read_config(
        {
            "model_type": "deepseek_v4",
            "rope_theta": BASE,
            "compress_rope_theta": COMPRESS_BASE,
            "qk_rope_head_dim": WIDTH,
            "rope_scaling": {
                "type": "yarn",
                "factor": FACTOR,
                "original_max_position_embeddings": CONTEXT,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        }
    )
    plain, one = inverse_frequencies(WIDTH, config.rope_parameters["main"])
    scaled, also_one = inverse_frequencies(WIDTH, config.rope_parameters["compress"])
    assert (one, also_one) == (1.0, 1.0)
    assert plain.tolist() == pytest.approx([BASE ** (-i / 32) for i in range(32)])
    assert scaled.tolist() == pytest.approx(engine_angles(1, COMPRESS_BASE, 1 / FACTOR, True))


def test_other_scalings_are_refused() -> None:
    for parameters in ({**YARN, "rope_type": "linear"}, {**YARN, "mscale": 0.7}):
        with pytest.raises(UnsupportedError, match="rotary scaling"):
            inverse_frequencies(WIDTH, parameters)


def test_the_tail_turns_and_turns_back() -> None:
    heads, width = 3, WIDTH + 16
    x = torch.randn(1, 5, heads, width, generator=torch.Generator().manual_seed(0))
    cos, sin = RotaryTables(WIDTH, YARN)(torch.tensor([[0, 1, 7, 4000, 70_000]]))
    turned = torch.ops.bessemer.rope(x, cos, sin, "interleaved", 16)
    assert torch.equal(turned[..., :16], x[..., :16])
    assert torch.equal(turned[0, 0], x[0, 0])  # position 0 does not turn
    for pair in range(WIDTH // 2):
        i = 16 + 2 * pair
        c, s = cos[..., None, pair], sin[..., None, pair]
        torch.testing.assert_close(turned[..., i], x[..., i] * c - x[..., i + 1] * s)
        torch.testing.assert_close(turned[..., i + 1], x[..., i] * s + x[..., i + 1] * c)
    back = torch.ops.bessemer.rope(turned, cos, -sin, "interleaved", 16)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-6)
