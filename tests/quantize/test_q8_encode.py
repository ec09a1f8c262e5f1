"""Q8_0 encoding: error, exact take-over of blocks that already are Q8_0, packing of panels."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from bessemer.artifact.layout import StoredWeight
from bessemer.artifact.packing import pack, unpack
from bessemer.errors import CompileError
from bessemer.quantize.q8_0 import BLOCKS_AT_ONCE, LARGEST, encode


def decode(scales: np.ndarray, quantised: np.ndarray) -> np.ndarray:
    return scales.astype(np.float32)[..., None] * quantised.astype(np.float32)


def test_error_is_half_a_step() -> None:
    values = np.random.default_rng(0).standard_normal((50, 3, 32), dtype=np.float32)
    scales, quantised = encode(values)
    step = np.abs(values).max(-1, keepdims=True) / LARGEST
    # Half a step, and what the rounding of the scale to f16 (2 ** -11) adds over 127 steps.
    assert (np.abs(decode(scales, quantised) - values) <= step * (0.5 + LARGEST * 2**-11)).all()
    assert np.abs(quantised.astype(int)).max() <= LARGEST


@pytest.mark.parametrize("largest", [127, 126, 100, 13, 3, 1])
def test_decoded_blocks_are_taken_over(largest: int) -> None:
    """Numbers that are f16 scale times integers come back as they are, whatever the largest."""
    rng = np.random.default_rng(largest)
    quantised = rng.integers(-largest, largest + 1, (40, 32)).astype(np.float32)
    quantised[:, 5] = largest
    scales = rng.uniform(1e-4, 1, (40, 1)).astype(np.float16).astype(np.float32)
    values = scales * quantised
    assert np.array_equal(decode(*encode(values)), values)


@pytest.mark.parametrize("factor", [2, 3, 7, 21])
def test_integers_with_a_common_factor_are_taken_over(factor: int) -> None:
    """The common measure of their weights has more bits than an f16; the scale has not."""
    rng = np.random.default_rng(factor)
    most = LARGEST // factor
    quantised = factor * rng.integers(-most, most + 1, (60, 32)).astype(np.float32)
    scales = rng.uniform(1e-4, 1, (60, 1)).astype(np.float16).astype(np.float32)
    assert np.array_equal(decode(*encode(scales * quantised)), scales * quantised)


@pytest.mark.parametrize("late", [0, 1, 5, 20, 31])
def test_one_weight_may_settle_the_scale(late: int) -> None:
    """All weights but one are multiples of six steps, so that every other subset misleads."""
    rng = np.random.default_rng(late)
    quantised = 6 * rng.integers(1, 19, (30, 32)).astype(np.float32)
    quantised[:, late] = 15
    values = np.float32(0.01171875) * quantised
    scales, integers = encode(values)
    assert np.array_equal(decode(scales, integers), values)
    # Three steps measure all weights, and no more: the greatest scale is the one that is kept.
    assert (scales.astype(np.float32) == np.float32(3 * 0.01171875)).all()


@pytest.mark.parametrize("form", ["Q8_0", "Q4_0", "Q5_0"])
def test_a_gguf_tensor_is_taken_over(form: str) -> None:
    values = np.random.default_rng(1).standard_normal((256, 96), dtype=np.float32)
    kind = gguf.GGMLQuantizationType[form]
    held = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    assert np.array_equal(decode(*encode(held.reshape(256, 3, 32))).reshape(256, 96), held)


def test_blocks_are_encoded_by_themselves() -> None:
    """Whatever lies beside a block, and wherever the cut between parts is."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((BLOCKS_AT_ONCE + 3, 32), dtype=np.float32)
    values[::3] = 0.25 * np.rint(8 * values[::3])
    scales, quantised = encode(values.reshape(-1, 1, 32))
    for i in (0, 1, 3, BLOCKS_AT_ONCE - 1, BLOCKS_AT_ONCE, BLOCKS_AT_ONCE + 2):
        alone = encode(values[i])
        assert alone[0] == scales[i, 0]
        assert np.array_equal(alone[1], quantised[i, 0])


def test_zeros_denormals_and_overflow() -> None:
    assert not decode(*encode(np.zeros((2, 32), np.float32))).any()
    tiny = np.full((1, 32), 1e-30, np.float32)
    assert np.isfinite(decode(*encode(tiny))).all()
    scales, _ = encode(np.full((1, 32), 1e9, np.float32))
    assert np.isinf(scales).all()


@pytest.mark.parametrize("shape", [(32, 32), (33, 40), (2, 5, 200), (64, 14464 // 64)])
def test_panels_round_trip(shape: tuple[int, ...]) -> None:
    """L11: depths that are no multiple of 32 keep their right tail."""
    weight = StoredWeight.place("w", shape, "q8_0", "panels", 0)
    values = np.random.default_rng(2).standard_normal(shape, dtype=np.float32)
    data = np.concatenate(list(pack(values, weight)))
    assert data.nbytes == weight.nbytes
    got = unpack(data, weight)
    assert got.shape == shape
    assert np.abs(got - values).max() < 0.02
    again = np.concatenate(list(pack(got, weight)))
    assert np.array_equal(again, data)


def test_what_no_scale_reaches_is_an_error() -> None:
    weight = StoredWeight.place("big", (32, 32), "q8_0", "panels", 0)
    with pytest.raises(CompileError, match=r"'big' holds 1e\+09"):
        list(pack(np.full((32, 32), 1e9, np.float32), weight))
