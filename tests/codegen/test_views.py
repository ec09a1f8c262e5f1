"""Views of buffers: what reshape, slice and permute re-index without a copy, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.codegen.views import Buffer, View, dense_strides, view_through, whole
from bessemer.errors import CompileError
from bessemer.graph import Dim, DType, Shape, TensorType, build, param

T = Dim.sym("T")
ROWS = 3


def through(view: View, op: str, **attrs: object) -> View | None:
    node = build(op, [param("x", TensorType(DType.F32, view.shape))], **attrs)  # type: ignore[arg-type]
    return view_through(node, view)


def as_array(view: View, memory: np.ndarray) -> np.ndarray:
    """The view's elements out of the buffer's memory."""
    shape = tuple(ROWS if isinstance(s, Dim) else s for s in view.shape)
    strides = tuple(s * memory.itemsize for s in view.strides)
    return np.lib.stride_tricks.as_strided(memory[view.offset :], shape, strides)


def buffer(shape: Shape) -> tuple[View, np.ndarray]:
    view = whole(Buffer("b", "f32", shape, "arena"))
    size = int(np.prod([ROWS if isinstance(s, Dim) else s for s in shape]))
    return view, np.arange(size, dtype=np.float32)


def test_heads_of_a_merged_qkv() -> None:
    """linear -> slice -> reshape: the way of q, k and v."""
    base, memory = buffer((T, 60))
    rows = as_array(base, memory)
    part = through(base, "slice", axis=-1, start=24, stop=48)
    assert part is not None
    heads = through(part, "reshape", shape=(T, 3, 8))
    assert heads is not None
    assert heads.strides == (60, 8, 1)
    assert np.array_equal(as_array(heads, memory), rows[:, 24:48].reshape(ROWS, 3, 8))
    inner = through(heads, "slice", axis=-1, start=2, stop=6)
    assert inner is not None
    assert np.array_equal(as_array(inner, memory), rows[:, 24:48].reshape(ROWS, 3, 8)[..., 2:6])
    assert through(inner, "reshape", shape=(T, 12)) is None, "12 elements that are not adjacent"


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [((T, 6, 4), (T, 24)), ((T, 24), (T, 2, 3, 4)), ((T, 1, 8), (T, 8, 1)), ((T,), (T, 1))],
)
def test_reshapes_of_dense_rows(shape: Shape, wanted: Shape) -> None:
    base, memory = buffer(shape)
    view = through(base, "reshape", shape=wanted)
    assert view is not None
    assert np.array_equal(as_array(view, memory).reshape(-1), memory)


def test_permute_keeps_rows_and_the_last_axis() -> None:
    base, memory = buffer((T, 2, 3, 4))
    swapped = through(base, "permute", perm=(0, 2, 1, 3))
    assert swapped is not None
    assert np.array_equal(as_array(swapped, memory), as_array(base, memory).transpose(0, 2, 1, 3))
    assert not swapped.is_contiguous
    assert through(base, "permute", perm=(1, 0, 2, 3)) is None
    assert through(base, "permute", perm=(0, 1, 3, 2)) is None


def test_what_needs_a_copy() -> None:
    base, _ = buffer((T, 8))
    assert through(base, "slice", axis=-1, start=0, stop=8, step=2) is None
    static = whole(Buffer("b", "f32", (4, 8), "arena"))
    assert through(static, "reshape", shape=(8, 4)) is None, "rows must stay rows"
    assert through(static, "slice", axis=-2, start=1, stop=3) is None


def test_strides() -> None:
    assert dense_strides((T, 3, 4)) == (12, 4, 1)
    assert dense_strides(()) == ()
    assert dense_strides((3, T, 4)) == (4, 12, 1), "rows are outermost wherever they stand"
    with pytest.raises(CompileError, match="square of the number of tokens"):
        dense_strides((T, T))
