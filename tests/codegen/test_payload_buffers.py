"""Temporaries of generic groups: on the stack, in scratch memory, never from the heap."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from bessemer.codegen.payload import emit_generic_group, group_operands
from bessemer.codegen.payload.buffers import STACK_BUFFER_BYTES, place_buffers
from bessemer.errors import CompileError
from bessemer.graph.core import Value
from bessemer.graph.schema import constant, emit
from tests.codegen.payload_harness import CHUNK, Case, Library, T, state, tensor, weight

WIDE = 1000


def _norms(x: Value, count: int) -> Value:
    """Norms after each other, each of which needs the one before in memory."""
    for _ in range(count):
        x = emit("softmax", emit("add", x, constant(0.5)))
    return x


def _cases() -> list[Case]:
    x = tensor("x", T, WIDE)
    chain = _norms(x, 6)
    long_lived = emit("exp", x)
    return [
        Case("chain", [chain]),
        Case("long", [emit("mul", _norms(long_lived, 3), long_lived)]),
        Case("statistics", [emit("rms_norm", tensor("h", T, 9, 64), weight("w", 64), eps=1e-5)]),
        Case("scores", [_scores()]),
        Case("table", [emit("take", constant(np.arange(300, dtype=np.float32).reshape(100, 3)),
                            emit("iota", size=T), axis=-2)]),
        Case("table_again", [emit("mul", x, constant(np.linspace(0, 1, WIDE, dtype=np.float32)))]),
    ]  # fmt: skip


def _scores() -> Value:
    q, k = tensor("q", T, 2, 8), tensor("k", T, 2, 8)
    q, k = (emit("permute", v, perm=(1, 0, 2)) for v in (q, k))
    return emit("reduce_max", emit("softmax", emit("matmul", q, k, transpose_b=True)), axes=(-1,))


CASES = _cases()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(CASES, tmp_path_factory.mktemp("buffers"))


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_values(library: Library, name: str) -> None:
    for rows in (1, 2, 5, 33, CHUNK):
        library.check(name, rows, library.cases[name].data(rows), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_nothing_is_allocated(library: Library, name: str) -> None:
    for mode in library.cases[name].modes():
        text = library.groups[name, mode].text
        assert "memref.alloc(" not in text
        assert "memref.dealloc" not in text
        for match in re.finditer(r"memref\.alloca\(\).*: memref<([\dx]*)x?(f32|i64)>", text):
            count = int(np.prod([int(n) for n in match[1].split("x") if n]))
            assert count * 8 <= 2 * STACK_BUFFER_BYTES


def test_temporaries_share_memory(library: Library) -> None:
    """However long the chain: two rows are alive at a time."""
    row = -(-WIDE * 4 // 64) * 64
    assert library.groups["chain", "rows"].thread_scratch_bytes == 2 * row
    assert library.groups["long", "rows"].thread_scratch_bytes == 3 * row


def test_scratch_covers_the_longest_call(library: Library) -> None:
    nbytes = library.groups["scores", "whole"].thread_scratch_bytes
    assert 2 * CHUNK * CHUNK * 4 <= nbytes <= 4 * CHUNK * CHUNK * 4
    spec = library.cases["scores"].spec
    twice = emit_generic_group("scores", spec, split_rows=False, chunk=2 * CHUNK)
    assert twice.thread_scratch_bytes > 3 * nbytes


def test_statistics_of_a_row_are_on_the_stack(library: Library) -> None:
    assert library.groups["statistics", "rows"].thread_scratch_bytes == 0


def test_constants_have_the_name_of_their_group(library: Library) -> None:
    text = library.groups["table_again", "rows"].text
    assert "memref.global" in text
    assert "@table_again_rows_constant_" in text
    assert "@__constant" not in text


def test_a_group_that_mixes_rows_can_not_be_split() -> None:
    spec = next(c for c in CASES if c.name == "scores").spec
    with pytest.raises(CompileError, match="mixes rows"):
        emit_generic_group("g", spec, split_rows=True, chunk=CHUNK)


def test_strided_operands_keep_their_type() -> None:
    case = Case("g", [emit("neg", tensor("x", T, 8))])
    x, out = group_operands(case.spec)
    given = (replace(x, strides=(24, 1)), out)
    text = emit_generic_group("g", case.spec, split_rows=True, chunk=4, operands=given).text
    assert "memref<?x8xf32, strided<[24, 1]>>" in text


def test_state_operands_are_named_so() -> None:
    cache = state("s", 5, 6)
    value = emit("mul", cache, constant(0.5))
    operands = group_operands(Case("g", [value], updates={value: cache}).spec)
    assert [o.role for o in operands] == ["state"]


def test_sizes_without_a_bound_are_refused() -> None:
    import mlir.ir as ir

    text = """
    func.func @f(%b: index, %e: index, %rows: index, %s: memref<?xi8>, %n: memref<1xindex>) {
      %c0 = arith.constant 0 : index
      %size = memref.load %n[%c0] : memref<1xindex>
      %t = memref.alloc(%size) : memref<?xf32>
      %x = memref.load %t[%c0] : memref<?xf32>
      return
    }"""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        function = next(iter(module.body)).operation
        with pytest.raises(CompileError, match="no known bound"):
            place_buffers(function, 3, 2, lambda argument, axis: 0, CHUNK)


def test_a_temporary_that_a_loop_hands_on_is_refused() -> None:
    import mlir.ir as ir

    text = """
    func.func @f(%b: index, %e: index, %rows: index, %s: memref<?xi8>, %m: memref<1024xf32>) {
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      %r = scf.for %i = %b to %e step %c1 iter_args(%a = %m) -> (memref<1024xf32>) {
        %t = memref.alloc() : memref<1024xf32>
        scf.yield %t : memref<1024xf32>
      }
      %x = memref.load %r[%c0] : memref<1024xf32>
      return
    }"""
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        function = next(iter(module.body)).operation
        with pytest.raises(CompileError, match="outlives"):
            place_buffers(function, 3, 2, lambda argument, axis: 0, CHUNK)
