"""Values as views of buffers, so that slices and reshapes of rows cost nothing.

A buffer is memory that one group writes (or an input, a weight, an output). A view says how a value
lies in it: element offset, shape and strides. All strides are known: the rows are outermost in
memory, whichever axis they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bessemer.codegen.group import ELEMENT_BYTES, ROWS, Operand
from bessemer.errors import CompileError
from bessemer.graph.core import Node, Value
from bessemer.graph.dims import Dim, Shape, Size, product

_ELEMENTS = {"f32": "f32", "f16": "f16", "i64": "i64", "i32": "i32", "bool": "i8"}


@dataclass(frozen=True, eq=False)
class Buffer:
    """kind: "arena", "input", "output", "weight", "state" (one of a module's own), or "session"
    (the session's whole state as bytes). offset: bytes, for weights.
    rows: the symbol of its leading size, or None when that is static.
    """

    name: str
    element: str
    shape: Shape
    kind: str
    offset: int = 0

    @property
    def rows(self) -> str | None:
        first = self.shape[0] if self.shape else None
        return first.terms[0][0] if isinstance(first, Dim) else None

    def nbytes(self, rows: int) -> int:
        """Bytes when every symbol is `rows`."""
        count = product(self.shape)
        if isinstance(count, Dim):
            count = count.evaluate({name: rows for name, _ in count.terms})
        return count * ELEMENT_BYTES[self.element]


@dataclass(frozen=True)
class View:
    """Elements of a buffer. offset and strides are in elements."""

    buffer: Buffer
    offset: int
    shape: Shape
    strides: tuple[int, ...]

    def operand(self, role: str = "in") -> Operand:
        shape = tuple(ROWS if isinstance(s, Dim) else s for s in self.shape)
        return Operand(self.buffer.element, shape, self.strides, role)

    @property
    def is_contiguous(self) -> bool:
        return self.strides == dense_strides(self.shape)


def dense_strides(shape: Shape) -> tuple[int, ...]:
    """Strides of a dense buffer: row-major, but with the symbolic size, if any, outermost."""
    symbolic = [i for i, size in enumerate(shape) if isinstance(size, Dim)]
    if len(symbolic) > 1:
        raise CompileError(
            f"a value of shape {list(shape)} can't be kept: its size grows with the square of the "
            "number of tokens"
        )
    strides = [0] * len(shape)
    step = 1
    for i, size in reversed(list(enumerate(shape))):
        if not isinstance(size, Dim):
            strides[i] = step
            step *= size
    for i in symbolic:
        strides[i] = step
    return tuple(strides)


def whole(buffer: Buffer) -> View:
    return View(buffer, 0, buffer.shape, dense_strides(buffer.shape))


def element_of(value: Value) -> str:
    return _ELEMENTS[str(value.dtype)]


def view_through(node: Node, source: View) -> View | None:
    """The view that a reshape, slice or permute makes of `source`, or None when it needs a copy."""
    if node.op == "reshape":
        return _reshape(source, node.types[0].shape)
    if node.op == "slice":
        return _slice(node, source)
    if node.op == "permute":
        return _permute(node, source)
    return None


def _reshape(source: View, shape: Shape) -> View | None:
    if source.shape == shape:
        return source
    if not shape or not source.shape or source.shape[0] != shape[0]:
        return None
    strides = _split_strides(source.shape[1:], source.strides[1:], shape[1:])
    if strides is None:
        return None
    return replace(source, shape=shape, strides=(source.strides[0], *strides))


def _split_strides(shape: Shape, strides: tuple[int, ...], wanted: Shape) -> tuple[int, ...] | None:
    """Strides of `wanted` over the same elements, when no copy is needed; sizes are static."""
    sizes = [s for s in shape if not isinstance(s, Dim)]
    if len(sizes) != len(shape) or any(isinstance(s, Dim) for s in wanted):
        return None
    # Merge neighbours that lie densely, then cut the merged runs into the wanted sizes.
    runs: list[list[int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    result: list[int] = []
    for size in reversed([int(str(s)) for s in wanted]):
        if size == 1:
            result.insert(0, result[0] if result else 1)
            continue
        if not runs or runs[-1][0] % size:
            return None
        left, stride = runs[-1]
        result.insert(0, stride)
        runs[-1] = [left // size, stride * size]
        if runs[-1][0] == 1:
            runs.pop()
    return tuple(result) if not runs else None


def _slice(node: Node, source: View) -> View | None:
    axis, start, step = (node.attrs[k] for k in ("axis", "start", "step"))
    if not isinstance(axis, int) or not isinstance(start, int) or step != 1:
        return None
    at = axis + len(source.shape)
    if at == 0:
        return None
    offset = source.offset + start * source.strides[at]
    return replace(source, offset=offset, shape=node.types[0].shape)


def _permute(node: Node, source: View) -> View | None:
    perm = node.attrs["perm"]
    assert isinstance(perm, tuple)
    if not perm or perm[0] != 0 or perm[-1] != len(perm) - 1:
        return None
    return replace(
        source,
        shape=tuple(source.shape[p] for p in perm),
        strides=tuple(source.strides[p] for p in perm),
    )


def rows_of(shape: Shape) -> str | None:
    """The symbol of a shape's leading size."""
    first: Size | None = shape[0] if shape else None
    return first.terms[0][0] if isinstance(first, Dim) else None
