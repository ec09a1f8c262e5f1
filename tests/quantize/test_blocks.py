"""Block formats, bit for bit against ggml's reference dequantisation in the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import quants

from bessemer.quantize import (
    FLOAT_FORMATS,
    FORMATS,
    BlockFormat,
    blocks,
    decode_blocks,
    f32_to_bf16,
    storage_format,
)

QUANTISED = [name for name in FORMATS if name not in FLOAT_FORMATS]
SCALE_FIELDS = ("d", "dmin", "m")


def random_blocks(fmt: BlockFormat, count: int, seed: int) -> np.ndarray:
    """Blocks with every bit random, except that the f16 scales are finite: uint8 [count, bytes]."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (count, fmt.block_bytes), dtype=np.uint8)
    fields = raw.view(fmt.layout)
    for field in SCALE_FIELDS:
        if field in (fmt.layout.names or ()):
            scale = np.exp(rng.uniform(-16, 8, (count, 1))) * rng.choice([-1, 1], (count, 1))
            fields[field] = scale.astype(np.float16)
    return raw


@pytest.mark.parametrize("name", QUANTISED)
def test_decodes_to_the_bits_of_the_reference(name: str) -> None:
    fmt = storage_format(name)
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert gguf.GGML_QUANT_SIZES[kind] == (fmt.elements, fmt.block_bytes)
    raw = random_blocks(fmt, 700, seed=len(name))
    expected = quants.dequantize(raw, kind)
    actual = decode_blocks(fmt, raw.reshape(-1), (700, fmt.elements))
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", QUANTISED)
def test_chunks_do_not_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = storage_format(name)
    raw = random_blocks(fmt, 37, seed=5).reshape(-1)
    whole = decode_blocks(fmt, raw, (37, fmt.elements))
    monkeypatch.setattr(blocks, "DECODE_CHUNK_ELEMENTS", 4 * fmt.elements)
    assert np.array_equal(decode_blocks(fmt, raw, (37, fmt.elements)), whole)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_decoded_weights_are_near_what_was_encoded(name: str) -> None:
    weights = np.random.default_rng(3).standard_normal((8, 256)).astype(np.float32)
    raw = quants.quantize(weights, gguf.GGMLQuantizationType[name.upper()])
    actual = decode_blocks(storage_format(name), raw.reshape(-1), weights.shape)
    tolerance = {"q8_0": 0.02, "q5_0": 0.15, "q5_1": 0.15}.get(name, 0.3)
    assert np.abs(actual - weights).max() < tolerance


def test_an_infinite_or_nan_scale_shows_in_the_weights() -> None:
    fmt = storage_format("q4_k")
    raw = random_blocks(fmt, 2, seed=1)
    raw.view(fmt.layout)["d"] = np.array([[np.nan], [np.inf]], np.float16)
    decoded = decode_blocks(fmt, raw.reshape(-1), (2, 256))
    assert np.isnan(decoded[0]).all()
    assert not np.isfinite(decoded[1]).all()


@pytest.mark.parametrize("name", sorted(FLOAT_FORMATS))
def test_plain_formats_decode_from_unaligned_bytes(name: str) -> None:
    values = np.array([[0.5, -2.0, 3.0], [1e-3, 0.0, 4096.0]], np.float32)
    stored = {"f32": values, "f16": values.astype(np.float16), "bf16": f32_to_bf16(values)}[name]
    data = np.frombuffer(b"x" + stored.tobytes(), np.uint8)[1:]
    actual = decode_blocks(storage_format(name), data, (2, 3))
    expected = values if name == "f32" else stored.astype(np.float32)
    if name == "bf16":
        expected = (stored.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(actual, expected)


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    fmt = storage_format("q8_0")
    with pytest.raises(ValueError, match="34 bytes do not hold 64 values"):
        decode_blocks(fmt, np.zeros(34, np.uint8), (2, 32))
    with pytest.raises(ValueError, match="whole q8_0 blocks"):
        decode_blocks(fmt, np.zeros(34, np.uint8), (1, 33))
    with pytest.raises(KeyError, match=r"q9_9.*q8_0"):
        storage_format("q9_9")
