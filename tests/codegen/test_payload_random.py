"""Random graphs of all kinds of ops, row by row and whole, against the references."""

from __future__ import annotations

import pytest

from tests.codegen.payload_harness import Library
from tests.codegen.payload_random import random_case

# Seed 3 makes LLVM 22's SLP vectoriser leave invalid IR, which the backend must notice.
SEEDS = range(14)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    cases = [random_case(seed) for seed in SEEDS]
    assert any(case.splits for case in cases)
    return Library(cases, tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs(library: Library, seed: int) -> None:
    name = f"random{seed}"
    for rows in (1, 2, 5, 33):
        library.check(name, rows, library.cases[name].data(rows, rows), rtol=2e-4, atol=2e-4)
