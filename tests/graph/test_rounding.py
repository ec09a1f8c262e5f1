"""Low-precision steps against the numbers that the formats hold, written out."""

import numpy as np
import pytest
import torch

from bessemer.graph import Env, GraphError, build, constant, evaluate_node
from bessemer.graph.ops.compressed import round_row
from bessemer.graph.ops.rounding import NARROW, hadamard, power_of_two_scale, round_to


def e4m3_values():
    """Every finite magnitude of E4M3: exponent bias 7, 3 bits of mantissa, NaN in place of 480."""
    small = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array([*small, *normal[:-1]], np.float32)


VALUES = {"e4m3": e4m3_values(), "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)}


def nearest(x, values):
    """The nearest of `values` by magnitude; on ties the one at an even place."""
    distance = np.abs(np.abs(x) - values)
    best = np.flatnonzero(distance == distance.min())
    chosen = best[0] if len(best) == 1 or best[0] % 2 == 0 else best[1]
    return np.copysign(values[chosen], x)


@pytest.mark.parametrize("name", VALUES)
def test_rounding_is_to_the_nearest_value_ties_to_even(name):
    values = VALUES[name]
    assert values.max() == NARROW[name].largest
    middles = (values[1:] + values[:-1]) / 2
    near = np.concatenate([middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9)])
    x = np.concatenate([values, near, -values, -near, [1e6, -1e6, 1e-9]]).astype(np.float32)
    want = [nearest(min(max(v, -values.max()), values.max()), values) for v in x]
    np.testing.assert_array_equal(round_to(x, NARROW[name]), np.array(want, np.float32))


def test_e4m3_is_that_of_torch():
    x = (np.random.default_rng(0).standard_normal(4000) * 60).astype(np.float32)
    want = torch.from_numpy(x).to(torch.float8_e4m3fn).to(torch.float32).numpy()
    np.testing.assert_array_equal(round_to(x, NARROW["e4m3"]), want)


@pytest.mark.parametrize("name", VALUES)
def test_the_scale_is_the_least_power_of_two_that_fits(name):
    narrow = NARROW[name]
    powers = np.float32(2.0) ** np.arange(-12, 12)
    exact = powers * np.float32(narrow.largest)
    np.testing.assert_array_equal(power_of_two_scale(exact, narrow), powers)
    over = np.nextafter(exact, np.float32(1e30))
    np.testing.assert_array_equal(power_of_two_scale(over, narrow), 2 * powers)
    floor = power_of_two_scale(np.zeros(1, np.float32), narrow)
    assert floor == 2.0 ** np.ceil(np.log2(narrow.floor / narrow.largest))


@pytest.mark.parametrize(("name", "block"), [("e4m3", 64), ("e2m1", 32)])
def test_a_round_trip_goes_block_by_block(name, block):
    x = (np.random.default_rng(1).standard_normal((3, 2 * block + 5)) * 50).astype(np.float32)
    x[0, :block] = 0
    begin, end = 5, 5 + 2 * block
    node = build("round_trip", [constant(x)], format=name, block=block, begin=begin, end=end)
    (got,) = evaluate_node(node, [x], Env())
    want = x.copy()
    for row in want:
        for start in range(begin, end, block):
            part = row[start : start + block]
            amax = max(float(np.abs(part).max()), NARROW[name].floor)
            scale = 2.0 ** np.ceil(np.log2(amax / NARROW[name].largest))
            row[start : start + block] = [nearest(v / scale, VALUES[name]) * scale for v in part]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_hadamard(size):
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = np.random.default_rng(2).standard_normal((3, size)).astype(np.float32)
    np.testing.assert_allclose(hadamard(x), x @ matrix / np.sqrt(size), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(hadamard(hadamard(x)), x, rtol=1e-5, atol=1e-6)


def test_compressed_rows_are_rounded_as_their_stream_says():
    row = (np.random.default_rng(3).standard_normal(128 + 8) * 3).astype(np.float32)
    got = round_row(row, "e4m3", 8)
    for start in (0, 64):
        part = row[start : start + 64]
        scale = 2.0 ** np.ceil(np.log2(np.abs(part).max() / 448))
        want = [np.float16(nearest(v / scale, VALUES["e4m3"]) * scale) for v in part]
        np.testing.assert_array_equal(got[start : start + 64], np.array(want, np.float32))
    np.testing.assert_array_equal(got[128:], row[128:].astype(np.float16).astype(np.float32))
    index = round_row(row[:128], "e2m1", 8)
    turned = hadamard(row[:128])
    for start in range(0, 128, 32):
        scale = 2.0 ** np.ceil(np.log2(np.abs(turned[start : start + 32]).max() / 6))
        want = [nearest(v / scale, VALUES["e2m1"]) * scale for v in turned[start : start + 32]]
        np.testing.assert_array_equal(index[start : start + 32], np.array(want, np.float32))
    np.testing.assert_array_equal(round_row(row, "none", 8), row)


def test_no_rows_and_nothing_to_round():
    """A prompt that closes no block has zero compressed rows; all of a row may be rotary."""
    assert hadamard(np.zeros((1, 0, 64), np.float32)).shape == (1, 0, 64)
    for how in ("e4m3", "e2m1", "none"):
        for shape in ((0, 64), (1, 0, 64)):
            assert round_row(np.zeros(shape, np.float32), how, 0).shape == shape
    x = np.zeros((0, 64), np.float32)
    node = build("round_trip", [constant(x)], format="e4m3", block=64, end=64)
    assert evaluate_node(node, [x], Env())[0].shape == (0, 64)
    row = np.array([1.2345, -3], np.float32)
    np.testing.assert_array_equal(round_row(row, "e4m3", 2), row.astype(np.float16))


@pytest.mark.parametrize(
    ("op", "width", "attrs"),
    [
        ("round_trip", 64, {"format": "e5m2", "block": 32, "end": 64}),
        ("round_trip", 64, {"format": "e4m3", "block": 48, "end": 64}),
        ("round_trip", 64, {"format": "e4m3", "block": 32, "end": 96}),
        ("hadamard", 48, {}),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(op, width, attrs):
    with pytest.raises(GraphError):
        build(op, [constant(np.zeros((2, width), np.float32))], **attrs)
