"""The cache update writes the layout of StateLayout, and nothing else."""

import numpy as np
import pytest

import bessemer.codegen.kernels  # noqa: F401
from bessemer.artifact.layout import KVLayer
from bessemer.codegen.group import ROWS, GroupSpec, Operand
from tests.codegen.kernel_harness import LANES, Cache, CompiledKernel, codegen_target, row_operand


def _expected(region: tuple, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> tuple:
    keys, values, rows = region
    keys, values = keys.copy(), values.copy()
    for i, position in enumerate(positions):
        if position >= 0:
            at = position % rows
            keys[:, at // 32, :, at % 32] = k[i]
            values[:, at] = v[i]
    return keys, values


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize(("key_width", "value_width"), [(8, 8), (40, 20), (192, 128), (7, 3)])
def test_rows_land_where_the_layout_says(
    kv: str, lanes: int, key_width: int, value_width: int
) -> None:
    target = codegen_target(lanes, kv)
    layers = [KVLayer(0, 3, key_width, value_width, 0), KVLayer(1, 2, 8, 8, 0)]
    cache = Cache(layers, target, capacity=70, slots=2, slot=1)
    rng = np.random.default_rng(0)
    k = rng.standard_normal((21, 3, key_width)).astype(np.float32)
    v = rng.standard_normal((21, 3, value_width)).astype(np.float32)
    positions = np.arange(25, 46)
    before = cache.state.copy()
    expected = _expected(cache.region(0), cache.rounded(k), cache.rounded(v), positions)
    cache.append(0, k, v, positions, threads=3, order="reversed")
    keys, values, _ = cache.region(0)
    # Bytes are compared: the rows that nobody wrote hold NaN.
    assert keys.tobytes() == expected[0].tobytes()
    assert values.tobytes() == expected[1].tobytes()
    written = 21 * 3 * (key_width + value_width) * keys.itemsize
    assert 0 < (cache.state != before).sum() <= written


def test_ring_wraps() -> None:
    cache = Cache([KVLayer(0, 1, 8, 8, 40)], codegen_target(), capacity=4096, chunk=64)
    assert cache.region(0)[2] == 160
    rng = np.random.default_rng(1)
    for start in range(0, 480, 60):
        k = rng.standard_normal((60, 1, 8)).astype(np.float32)
        positions = np.arange(start, start + 60)
        expected = _expected(cache.region(0), k, k, positions)
        cache.append(0, k, k, positions, threads=2)
        assert cache.region(0)[0].tobytes() == expected[0].tobytes()
        assert cache.region(0)[1].tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_strided_rows_and_padding(kv: str) -> None:
    """k and v are slices of one merged buffer; a negative position is no row."""
    target = codegen_target(8, kv)
    cache = Cache([KVLayer(0, 2, 16, 8, 0)], target)
    stride = 2 * 16 + 2 * 16 + 2 * 8
    spec = GroupSpec(
        "kv_update",
        (
            row_operand("f32", (2, 16), stride),
            row_operand("f32", (2, 8), stride),
            Operand("i64", (ROWS,)),
            Operand("i64", (ROWS,)),
            Operand("i8", (ROWS,), role="state"),
        ),
        ("entry",),
    )
    merged = np.random.default_rng(2).standard_normal((5, stride)).astype(np.float32)
    k = np.lib.stride_tricks.as_strided(merged[:, 32:], (5, 2, 16), (4 * stride, 64, 4))
    v = np.lib.stride_tricks.as_strided(merged[:, 64:], (5, 2, 8), (4 * stride, 32, 4))
    positions = np.array([7, 8, -1, 9, 10])
    expected = _expected(cache.region(0), cache.rounded(k), cache.rounded(v), positions)
    kernel = CompiledKernel(spec, target)
    kernel(5, (k, v, positions, cache.slots(5), cache.state), (0,), threads=2)
    assert cache.region(0)[0].tobytes() == expected[0].tobytes()
    assert cache.region(0)[1].tobytes() == expected[1].tobytes()


def test_f16_rounding_and_overflow() -> None:
    cache = Cache([KVLayer(0, 1, 8, 8, 0)], codegen_target(8, "f16"))
    values = [1e-5, 2.0**-24, 2.0**-25, 65519.0, 65520.0, np.nan, -np.inf, 1 + 2.0**-11]
    row = np.array(values, np.float32).reshape(1, 1, 8)
    cache.append(0, row, row, np.array([3]))
    got = cache.region(0)[1][0, 3].view(np.uint16)
    with np.errstate(over="ignore"):
        expected = row[0, 0].astype(np.float16).view(np.uint16)
    assert got.tolist() == expected.tolist()
    assert cache.region(0)[0][0, 0, :, 3].view(np.uint16).tolist() == expected.tolist()
