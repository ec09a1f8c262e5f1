"""Symbolic sizes: linear algebra, exact division, text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bessemer.graph.dims import (
    Dim,
    evaluate_size,
    is_static,
    parse_size,
    product,
    substitute_size,
)

T, R = Dim.sym("T"), Dim.sym("R")
_coefficients = st.integers(-9, 9)


def linear(a: int, b: int, c: int):
    return a * T + b * R + c


sizes = st.builds(linear, _coefficients, _coefficients, _coefficients)


@given(sizes, sizes, _coefficients)
def test_arithmetic_is_that_of_the_numbers(x, y, k):
    values = {"T": 7, "R": 3}

    def number(size):
        return evaluate_size(size, values)

    assert number(x + y) == number(x) + number(y)
    assert number(x - y) == number(x) - number(y)
    assert number(x * k) == number(x) * k
    assert number(k - x) == k - number(x)


@given(sizes)
def test_text_reads_back(x):
    assert parse_size(str(x)) == x


@given(sizes)
def test_no_symbol_left_is_a_plain_int(x):
    assert isinstance(x - x, int)
    assert x - x == 0
    assert isinstance(substitute_size(x, {"T": 1, "R": 2}), int)


def test_equal_sizes_are_equal_however_built():
    assert T + 1 + R == R + T + 1
    assert 2 * T == T + T
    assert hash(T + R) == hash(R + T)
    assert T != R
    assert T != 1


def test_exact_division():
    assert (6 * T + 4) // 2 == 3 * T + 2
    assert (6 * T) // (2 * T) == 3
    assert (4 * T + 2 * R) // (2 * T + R) == 2
    for bad in (lambda: (3 * T + 1) // 2, lambda: T // 0, lambda: (T + 1) // T, lambda: T // R):
        with pytest.raises(TypeError):
            bad()


def test_product_takes_one_symbol():
    assert product((2, T, 3)) == 6 * T
    assert product(()) == 1
    assert product((0, T)) == 0
    with pytest.raises(TypeError, match="not a linear size"):
        product((T, T))


def test_substitution_keeps_other_symbols():
    assert (2 * T + R + 5).substitute({"T": 4}) == R + 13
    assert (2 * T).substitute({"T": R + 1}) == 2 * R + 2


def test_a_missing_symbol_is_named():
    with pytest.raises(KeyError, match="R"):
        (T + R).evaluate({"T": 1})


def test_is_static():
    assert is_static((1, 2))
    assert is_static(())
    assert not is_static((1, T))


@pytest.mark.parametrize("text", ["", "T*2", "2T", "T + ", "1.5", "T - 1"])
def test_bad_text_is_refused(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)
