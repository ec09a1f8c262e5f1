"""The native sampler draws the ids of the Python one, and numbers of numpy's generator."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import pytest

from bessemer.errors import GenerationError
from bessemer.native import FOLDER
from bessemer.runtime.sampling import Sampler, SamplingOptions
from tests.native.text_library import Error, NativeError, build_library

STEPS = 12
SIZES = (1, 5, 300, 5000, 49152)


class Sampling(ctypes.Structure):
    """bsm_sampling"""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p", "repeat_penalty")),
        ("top_k", ctypes.c_int64),
        ("repeat_last_n", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("bias_ids", "bias", "banned")),
        ("bias_count", ctypes.c_int64),
        ("banned_count", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("seed_words", ctypes.c_void_p),
        ("seed_count", ctypes.c_int64),
        ("has_seed", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


@functools.cache
def library() -> ctypes.CDLL:
    found = build_library([FOLDER / f"{name}.c" for name in ("sampler", "random", "errors")])
    found.bsm_sampler_uniform.restype = ctypes.c_double
    return found


def address(array: np.ndarray) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


class NativeSampler:
    def __init__(
        self,
        limit: int,
        *,
        seed: int | None = 0,
        logit_bias: dict[int, float] | None = None,
        banned: tuple[int, ...] = (),
        **options: Any,
    ) -> None:
        bias = logit_bias or {}
        # Kept, so that the addresses stay good until the sampler has its copies.
        ids = np.array(list(bias), np.int32)
        values, holes = np.array(list(bias.values()), np.float64), np.array(banned, np.int32)
        defaults = {"top_p": 1.0, "repeat_penalty": 1.0, "repeat_last_n": -1}
        sampling = Sampling(
            bias_ids=address(ids),
            bias=address(values),
            banned=address(holes),
            bias_count=len(ids),
            banned_count=len(holes),
            **{**defaults, **options},
        )
        words = np.array([0], np.uint32)
        if seed is not None and seed < 1 << 64:
            sampling.seed, sampling.has_seed = seed, 1
        elif seed is not None:
            words = np.frombuffer(seed.to_bytes(-(-seed.bit_length() // 32) * 4, "little"), "<u4")
            sampling.seed_words, sampling.seed_count = address(words), len(words)
        self._handle, error = ctypes.c_void_p(), Error()
        status = library().bsm_sampler_create(
            ctypes.byref(sampling),
            ctypes.c_int64(limit),
            ctypes.byref(self._handle),
            ctypes.byref(error),
        )
        if status:
            raise NativeError(error)

    def __del__(self) -> None:
        library().bsm_sampler_destroy(self._handle)

    def uniform(self) -> float:
        return float(library().bsm_sampler_uniform(self._handle))

    def pick(self, logits: np.ndarray, history: list[int]) -> int:
        row, past = np.ascontiguousarray(logits, np.float32), np.array(history, np.int32)
        found, error = ctypes.c_int32(), Error()
        status = library().bsm_sampler_pick(
            self._handle,
            address(row),
            ctypes.c_int64(row.size),
            address(past),
            ctypes.c_int64(past.size),
            ctypes.byref(found),
            ctypes.byref(error),
        )
        if status:
            raise NativeError(error)
        return found.value


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 - 1, 2**64, 3**100, 7**1000])
def test_generator(seed: int) -> None:
    """The same bits as numpy.random.Generator(PCG64(seed)).random()."""
    native, numpy = NativeSampler(10, seed=seed), np.random.Generator(np.random.PCG64(seed))
    assert [native.uniform() for _ in range(100)] == [numpy.random() for _ in range(100)]


def test_entropy() -> None:
    """Without a seed every sampler draws its own numbers."""
    samplers = [NativeSampler(10, seed=None, temperature=1.0) for _ in range(2)]
    assert len({sampler.uniform() for sampler in samplers}) == 2


@pytest.mark.parametrize("case", range(40))
def test_draws(case: int) -> None:
    rng = np.random.default_rng(case)
    size = int(rng.choice(SIZES))
    options: dict[str, Any] = {
        "temperature": float(rng.choice([0.0, 0.3, 0.8, 1.5, 1e-9])),
        "top_k": int(rng.choice([-1, 0, 1, 40, 1000])),
        "top_p": float(rng.choice([1.0, 0.9, 0.5, 0.0, 0.9999])),
        "min_p": float(rng.choice([0.0, 0.05, 1.0])),
        "repeat_penalty": float(rng.choice([1.0, 1.3, 0.7])),
        "repeat_last_n": int(rng.choice([-1, 0, 5])),
    }
    seed = int(rng.integers(0, 2**63)) << int(rng.choice([0, 40]))
    bias = {0: -np.inf, size - 1: 2.5} if case % 3 == 0 and size > 1 else {}
    banned = (size // 2,) if case % 4 == 0 and size > 2 else ()
    limit = size - 1 if case % 5 == 0 and size > 2 and not bias else size
    python = Sampler(SamplingOptions(**options, seed=seed, logit_bias=bias), limit, banned)
    native = NativeSampler(limit, seed=seed, logit_bias=bias, banned=banned, **options)
    history = [size + 3, 0]
    for step in range(STEPS):
        logits = rng.standard_normal(size).astype(np.float32) * rng.choice([0.5, 3.0, 8.0])
        if step % 3 == 0:
            logits = np.round(logits)  # many ties
        logits[rng.integers(0, size, size // 7)] = -np.inf
        logits[-1] = 0.0
        expected = python.sample(logits.astype(np.float32), history)
        assert native.pick(logits, history) == expected, (options, step)
        history.append(expected)


@pytest.mark.parametrize("temperature", [0.7, 3.0, 1e300])
@pytest.mark.parametrize("top_p", [0.0, 0.2, 0.6])
def test_scores_that_become_one_probability(temperature: float, top_p: float) -> None:
    """Both go by the scores, and so keep the same ids where many probabilities are equal."""
    for case in range(20):
        rng = np.random.default_rng(case)
        logits = (rng.integers(0, 3, (2, 7, 400)[case % 3]) * 3.86e-16).astype(np.float32)
        options = {"temperature": temperature, "top_p": top_p, "top_k": 5 * (case % 2)}
        python = Sampler(SamplingOptions(**options, seed=case), logits.size)
        native = NativeSampler(logits.size, seed=case, **options)
        expected = [python.sample(logits) for _ in range(10)]
        assert [native.pick(logits, []) for _ in range(10)] == expected
        if top_p == 0.0:
            assert set(expected) == {int(logits.argmax())}


def test_numbers_that_broke_down() -> None:
    native, python = NativeSampler(3), Sampler(SamplingOptions(), 3)
    cases = {"NaN": [0, np.nan, 1], "infinity": [0, np.inf, 1], "no token": [-np.inf] * 3}
    for words, row in cases.items():
        logits = np.array(row, np.float32)
        with pytest.raises(NativeError, match=words):
            native.pick(logits, [])
        with pytest.raises(GenerationError, match=words):
            python.sample(logits, [])


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": np.inf},
        {"top_p": 1.5},
        {"min_p": np.nan},
        {"repeat_penalty": 0.0},
        {"top_k": -2},
        {"repeat_last_n": -2},
        {"logit_bias": {10: 1.0}},
        {"logit_bias": {1: np.inf}},
    ],
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(NativeError):
        NativeSampler(10, **options)


@pytest.mark.parametrize("limit", [0, -1, 1 << 31, 1 << 62])
def test_wrong_limits(limit: int) -> None:
    with pytest.raises(NativeError, match=f"vocab_limit is {limit}; it must be from 1 to 21474836"):
        NativeSampler(limit)
