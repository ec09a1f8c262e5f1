"""Packing: panels, tails, dtypes, and the way back."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.artifact import packing
from bessemer.artifact.layout import StoredWeight
from bessemer.errors import CompileError
from bessemer.quantize.floats import f32_to_bf16, f32_to_f16


def packed(values: np.ndarray, weight: StoredWeight, **options: bool) -> np.ndarray:
    pieces = list(packing.pack(values, weight, **options))
    data = np.concatenate(pieces) if pieces else np.empty(0, np.uint8)
    assert data.nbytes == weight.nbytes
    return data


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_panels_are_k_major_with_zero_rows(rows: int, dtype: str) -> None:
    values = np.random.default_rng(rows).integers(-9, 9, (rows, 7)).astype(np.float32)
    weight = StoredWeight.place("w", (rows, 7), dtype, "panels", 0)
    data = packed(values, weight).view(packing.ELEMENTS[dtype]).reshape(weight.stored_shape)
    convert = {"f32": np.asarray, "f16": f32_to_f16, "bf16": f32_to_bf16}[dtype]
    for row in range(rows):
        assert np.array_equal(data[row // 32, :, row % 32], convert(values[row]))
    for row in range(rows, weight.stored_shape[0] * 32):
        assert not data[row // 32, :, row % 32].any()


@pytest.mark.parametrize("layout", ["plain", "panels"])
@pytest.mark.parametrize("shape", [(5, 3), (2, 33, 4), (2, 3, 65, 1)])
def test_unpack_is_the_inverse(layout: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for dtype in ("f32", "f16", "bf16"):
        weight = StoredWeight.place("w", shape, dtype, layout, 0)
        once = packing.unpack(packed(values, weight), weight)
        assert once.shape == shape
        assert np.allclose(once, values, rtol=2.0**-8)
        assert np.array_equal(packed(once, weight), packed(values, weight))


def test_a_matrix_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).standard_normal((2, 75, 6)).astype(np.float32)
    weights = [StoredWeight.place("w", (2, 75, 6), "f16", way, 0) for way in ("plain", "panels")]
    whole = [packed(values, w) for w in weights]
    monkeypatch.setattr(packing, "BLOCK_NUMBERS", 200)
    for weight, expected in zip(weights, whole, strict=True):
        assert len(list(packing.pack(values, weight))) > 2
        assert np.array_equal(packed(values, weight), expected)


def test_stored_bits_are_kept() -> None:
    bits = np.arange(65536, dtype=np.uint16).reshape(2048, 32)
    for dtype in ("f16", "bf16"):
        weight = StoredWeight.place("w", bits.shape, dtype, "plain", 0)
        data = packed(bits, weight, stored=True)
        assert np.array_equal(data.view(np.uint16), bits.reshape(-1))


@pytest.mark.parametrize("layout", ["plain", "panels"])
def test_a_number_beyond_f16_is_an_error(layout: str) -> None:
    values = np.ones((40, 3), np.float32)
    values[35, 1] = -70000.0
    weight = StoredWeight.place("model.big", values.shape, "f16", layout, 0)
    with pytest.raises(CompileError, match=r"'model.big' holds 70000.*--weights bf16 or"):
        packed(values, weight)
    packed(values, StoredWeight.place("model.big", values.shape, "bf16", layout, 0))


def test_bf16_overflow_advises_f32() -> None:
    values = np.full((1, 1), 3.4e38, np.float32)
    with pytest.raises(CompileError, match=r"bf16: compile with --weights f32"):
        packed(values, StoredWeight.place("w", (1, 1), "bf16", "plain", 0))


def test_an_infinite_or_nan_weight_stays() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1.0], np.float32)
    for dtype in ("f16", "bf16", "f32"):
        weight = StoredWeight.place("w", (4,), dtype, "plain", 0)
        assert np.array_equal(
            packing.unpack(packed(values, weight), weight), values, equal_nan=True
        )


def test_integers_and_booleans() -> None:
    for dtype, kind in (("i64", np.int64), ("i32", np.int32), ("bool", np.bool_)):
        values = np.array([[1, 0, 5], [0, 7, 0]]).astype(kind)
        weight = StoredWeight.place("w", (2, 3), dtype, "plain", 0)
        assert np.array_equal(packing.unpack(packed(values, weight), weight), values)


def test_another_shape_is_refused() -> None:
    with pytest.raises(CompileError, match=r"'w' has shape \[3, 2\]"):
        packed(np.ones((3, 2), np.float32), StoredWeight.place("w", (2, 3), "f32", "plain", 0))
