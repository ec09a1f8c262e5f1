"""Q8_0 encoding: error, exact take-over of blocks that already are Q8_0, packing of panels."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from bessemer.artifact.layout import StoredWeight
from bessemer.artifact.packing import pack, unpack
from bessemer.errors import CompileError
from bessemer.quantize.q8_0 import LARGEST, encode


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


def test_a_gguf_tensor_is_taken_over() -> None:
    values = np.random.default_rng(1).standard_normal((8, 96), dtype=np.float32)
    stored = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    held = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(decode(*encode(held.reshape(8, 3, 32))).reshape(8, 96), held)


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
