"""The builder of payloads: tensors, sizes, views, and loops whose bodies inline what they read.

A payload is built for all rows at once (`?` rows), or for one row, where the rows' symbol counts as
1 and every shape is static. The same code does both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from bessemer.artifact.layout import PANEL_ROWS
from bessemer.codegen.emit import Fn
from bessemer.codegen.payload import elementwise
from bessemer.codegen.payload.attrs import integer, integers
from bessemer.codegen.payload.fusion import Plan, is_elementwise, is_inline, is_splat
from bessemer.codegen.payload.scalar import BOOL_BYTE, ELEMENT, MEMORY, Scalars, literal
from bessemer.codegen.payload.spec import stored_shape
from bessemer.codegen.payload.views import (
    added,
    divided,
    reassociation,
    reshape_index,
    scaled,
)
from bessemer.errors import CompileError
from bessemer.graph.core import Node, Value
from bessemer.graph.dims import Dim, Shape, Size, substitute_size
from bessemer.graph.dtypes import DType

# Longest array that is written out in decimals; longer ones are one string of hex digits.
_READABLE_ELEMENTS = 64
Index = tuple[str, ...]  # affine expressions in the loops' dimensions d0, d1, ...


@dataclass(frozen=True)
class Tensor:
    """An SSA tensor. shape: the logical shape; the memory of "panels" is [..., N/32, K, 32]."""

    ssa: str
    shape: Shape
    element: str
    layout: str = "plain"

    @property
    def stored(self) -> Shape:
        return stored_shape(self.shape, self.layout)

    @property
    def type(self) -> str:
        return tensor_type(self.stored, self.element)


def tensor_type(shape: Sequence[Size], element: str) -> str:
    return f"tensor<{''.join(f'{_dim(s)}x' for s in shape)}{element}>"


def _dim(size: Size) -> str:
    return "?" if isinstance(size, Dim) else str(size)


class TextFn(Fn):
    """`Fn` with nested text: a region is written first, and its head when the region is known."""

    @contextlib.contextmanager
    def captured(self) -> Iterator[list[str]]:
        """Lines written inside go to the list that this gives."""
        outer, self._lines = self._lines, []
        self._depth += 1
        try:
            yield self._lines
        finally:
            self._lines = outer
            self._depth -= 1

    def append(self, lines: Sequence[str]) -> None:
        self._lines.extend(lines)


@dataclass
class Body:
    """The body of one linalg.generic under construction; `read` adds what it needs."""

    builder: Builder
    rank: int
    tensors: list[tuple[Tensor, Index, str]] = field(default_factory=list)
    _memo: dict[tuple[Value, Index], str] = field(default_factory=dict)

    @property
    def dims(self) -> Index:
        return tuple(f"d{i}" for i in range(self.rank))

    def read(self, value: Value, at: Sequence[str]) -> str:
        """The element of `value` at an index, as an SSA scalar of the value's dtype."""
        key = (value, tuple(at))
        if key not in self._memo:
            tensor = self.builder.env.get(value)
            found = (
                self._compute(value, key[1])
                if tensor is None
                else self.load(tensor, key[1], value.dtype)
            )
            self._memo[key] = found
        return self._memo[key]

    def load(self, tensor: Tensor, at: Index, dtype: DType) -> str:
        """An element of a tensor; narrow storage is widened."""
        if tensor.layout == "panels":
            panel, row = divided(at[-2], PANEL_ROWS)
            at = (*at[:-2], panel, at[-1], row)
        fn = self.builder.fn
        name = next((n for t, index, n in self.tensors if (t, index) == (tensor, at)), "")
        if not name:
            name = fn.fresh("e")
            self.tensors.append((tensor, at, name))
        return self.builder.from_memory(name, tensor.element, dtype)

    def ssa_index(self, expression: str) -> str:
        """An affine index expression as an SSA index."""
        fn = self.builder.fn
        if expression.isdigit():
            return fn.index(int(expression))
        dims = [d for d in self.dims if d in _words(expression)]
        names = [fn.op(f"linalg.index {d[1:]} : index") for d in dims]
        if expression == dims[0]:
            return names[0]
        affine_map = f"affine_map<({', '.join(dims)}) -> ({expression})>"
        return fn.op(f"affine.apply {affine_map}({', '.join(names)})")

    def _compute(self, value: Value, at: Index) -> str:
        node, fn = value.node, self.builder.fn
        if is_splat(node):
            flat = np.asarray(node.attrs["value"]).reshape(-1)
            return Scalars(fn, value.dtype).const(flat[0].item())
        if is_elementwise(node):
            operands = [self.read(v, self.builder.broadcast(v, at)) for v in node.inputs]
            return elementwise.apply(fn, node, operands)
        if node.op == "iota":
            return self._iota(value, at[0])
        return self.read(node.inputs[0], self.view_index(node, at))

    def view_index(self, node: Node, at: Index) -> Index:
        """Where a view's element lies in what it views."""
        (source,) = node.inputs
        shape = self.builder.shape(source)
        if node.op == "expand":
            return self.builder.broadcast(source, at)
        if node.op == "permute":
            order = integers(node, "perm")
            return tuple(at[order.index(i)] for i in range(len(order)))
        if node.op == "slice":
            axis = len(at) + integer(node, "axis")
            start = self.builder.static(node.attrs["start"])
            moved = added(scaled(at[axis], integer(node, "step")), str(start))
            return (*at[:axis], moved, *at[axis + 1 :])
        if node.op == "reshape":
            found = reshape_index(shape, self.builder.shape(node.out), at)
            if found is not None:
                return tuple(found)
        raise CompileError(f"{node} can't be read element by element ({node.loc})")

    def _iota(self, value: Value, at: str) -> str:
        attrs, b = value.node.attrs, self.builder
        fn = b.fn
        step, first = integer(value.node, "step"), integer(value.node, "start")
        index = self.ssa_index(at)
        if b.row is not None and isinstance(attrs["size"], Dim):
            own = b.static(attrs["size"])
            index = fn.add(index, b.row if own == 1 else fn.mul(b.row, fn.index(own)))
        whole = Scalars(fn, DType.I64)
        n = fn.cast_index(index, "index", "i64")
        n = n if step == 1 else whole.mul(n, whole.const(step))
        n = n if first == 0 else whole.add(n, whole.const(first))
        return whole.cast(n, value.dtype)


def _words(expression: str) -> set[str]:
    return set(expression.replace("(", " ").replace(")", " ").split())


Yield = Callable[[Body, list[str]], Sequence[str]]


class Builder:
    """Writes the ops of one payload into `fn`. `env` has the tensor of each value that has one."""

    def __init__(
        self,
        fn: TextFn,
        plan: Plan,
        symbols: Mapping[str, int | str],
        row: str | None = None,
    ) -> None:
        """symbols: each symbol's value, a number or an SSA index. row: the row that a payload of
        one row computes, as an SSA index.
        """
        self.fn = fn
        self.plan = plan
        self.row = row
        self.env: dict[Value, Tensor] = {}
        self.targets: dict[Value, Tensor] = {}
        self.in_place: set[Value] = set()
        self._symbols = symbols
        self._known = {name: n for name, n in symbols.items() if isinstance(n, int)}
        self._extents: dict[Dim, str] = {}

    # --- sizes ------------------------------------------------------------------------------------

    def size(self, size: Size) -> Size:
        """A size with the symbols that are numbers put in."""
        return substitute_size(size, self._known)

    def shape(self, value: Value) -> Shape:
        return tuple(self.size(s) for s in value.shape)

    def static(self, size: object) -> int:
        """A size that must be a number here. Raises CompileError."""
        found = self.size(size) if isinstance(size, int | Dim) else size
        if not isinstance(found, int):
            raise CompileError(f"a generic group needs the size {size} as a number")
        return found

    def prepare(self, sizes: Sequence[Size]) -> None:
        """Compute the symbolic sizes at the start, so that they are known in all regions."""
        for size in map(self.size, sizes):
            if isinstance(size, Dim) and size not in self._extents:
                fn = self.fn
                total = None if size.const == 0 else fn.index(size.const)
                for name, factor in size.terms:
                    one = str(self._symbols[name])
                    part = one if factor == 1 else fn.mul(one, fn.index(factor))
                    total = part if total is None else fn.add(total, part)
                self._extents[size] = str(total)

    def extent(self, size: Size) -> str:
        """A size as an SSA index."""
        size = self.size(size)
        return self._extents[size] if isinstance(size, Dim) else self.fn.index(size)

    def mixed(self, size: Size) -> str:
        """A size as it is written among static and dynamic sizes."""
        size = self.size(size)
        return self._extents[size] if isinstance(size, Dim) else str(size)

    def broadcast(self, value: Value, at: Sequence[str]) -> Index:
        """The index into an operand that broadcasts to where `at` points."""
        shape = self.shape(value)
        tail = at[len(at) - len(shape) :]
        return tuple("0" if s == 1 else d for s, d in zip(shape, tail, strict=True))

    # --- tensors ----------------------------------------------------------------------------------

    def empty(self, shape: Shape, element: str) -> Tensor:
        """Memory without contents."""
        dynamic = ", ".join(self.extent(s) for s in shape if isinstance(s, Dim))
        type_ = tensor_type(shape, element)
        return Tensor(self.fn.op(f"tensor.empty({dynamic}) : {type_}"), shape, element)

    def filled(self, target: Tensor, scalar: str) -> Tensor:
        scalar = self.to_memory(scalar, target.element)
        t = f"ins({scalar} : {target.element}) outs({target.ssa} : {target.type}) -> {target.type}"
        return Tensor(self.fn.op(f"linalg.fill {t}"), target.shape, target.element)

    def copied(self, source: Tensor, into: Tensor) -> Tensor:
        """`into` with the elements of `source`."""
        t = f"ins({source.ssa} : {source.type}) outs({into.ssa} : {into.type}) -> {into.type}"
        return Tensor(self.fn.op(f"linalg.copy {t}"), into.shape, into.element)

    def target(self, value: Value) -> Tensor:
        """Where the result `value` is to be written: an output's memory, or a temporary."""
        found = self.targets.get(value)
        return found or self.empty(self.shape(value), MEMORY[value.dtype])

    def reshaped(self, tensor: Tensor, shape: Shape) -> Tensor:
        """The same elements in another shape, without a copy."""
        if tensor.layout != "plain":
            raise CompileError(f"a reshape of the packed weight {tensor.ssa}")
        if shape == tensor.shape:
            return tensor
        if not tensor.shape or not shape:
            return self._regroup(tensor, shape, [], expand=not tensor.shape)
        pairs = reassociation(tensor.shape, shape)
        if any(len(left) > 1 for left, _ in pairs):
            middle = tuple(_product(tensor.shape, left) for left, _ in pairs)
            self.prepare(middle)
            tensor = self._regroup(tensor, middle, [left for left, _ in pairs], expand=False)
        if any(len(right) > 1 for _, right in pairs):
            tensor = self._regroup(tensor, shape, [right for _, right in pairs], expand=True)
        return tensor

    def _regroup(
        self, tensor: Tensor, shape: Shape, groups: Sequence[Sequence[int]], *, expand: bool
    ) -> Tensor:
        result = tensor_type(shape, tensor.element)
        text = f"[{', '.join(str(list(g)) for g in groups)}]"
        name = "collapse_shape"
        if expand:
            name = "expand_shape"
            text += f" output_shape [{', '.join(map(self.mixed, shape))}]"
        op = f"tensor.{name} {tensor.ssa} {text} : {tensor.type} into {result}"
        return Tensor(self.fn.op(op), shape, tensor.element)

    def part(
        self,
        tensor: Tensor,
        offsets: Sequence[str],
        sizes: Shape,
        steps: Sequence[int] | None = None,
        drop: Sequence[int] = (),
    ) -> Tensor:
        """A box of a tensor, in its stored shape, without the dimensions `drop` of size 1."""
        kept = tuple(s for i, s in enumerate(sizes) if i not in drop)
        box = self._box(offsets, sizes, steps)
        result = tensor_type(kept, tensor.element)
        op = f"tensor.extract_slice {tensor.ssa}{box} : {tensor.type} to {result}"
        return Tensor(self.fn.op(op), kept, tensor.element)

    def inserted(
        self,
        source: Tensor,
        into: Tensor,
        offsets: Sequence[str],
        sizes: Shape,
        steps: Sequence[int] | None = None,
    ) -> Tensor:
        """`into` with a box replaced."""
        box = self._box(offsets, sizes, steps)
        types = f"{source.type} into {into.type}"
        op = f"tensor.insert_slice {source.ssa} into {into.ssa}{box} : {types}"
        return Tensor(self.fn.op(op), into.shape, into.element)

    def _box(self, offsets: Sequence[str], sizes: Shape, steps: Sequence[int] | None) -> str:
        shown = ", ".join(map(str, steps or [1] * len(sizes)))
        return f"[{', '.join(offsets)}] [{', '.join(map(self.mixed, sizes))}] [{shown}]"

    def element(self, tensor: Tensor, at: Sequence[str], dtype: DType) -> str:
        """One element of a tensor, at SSA indices, as a scalar of the dtype."""
        found = self.fn.op(f"tensor.extract {tensor.ssa}[{', '.join(at)}] : {tensor.type}")
        return self.from_memory(found, tensor.element, dtype)

    def from_memory(self, scalar: str, element: str, dtype: DType) -> str:
        """A scalar of the dtype from what memory holds: floats may be narrower, bools are bytes."""
        wanted = ELEMENT[dtype]
        if element == wanted:
            return scalar
        if dtype == DType.BOOL:
            zero = self.fn.constant(f"arith.constant 0 : {element}")
            return self.fn.op(f"arith.cmpi ne, {scalar}, {zero} : {element}")
        return self.fn.op(f"arith.extf {scalar} : {element} to {wanted}")

    def to_memory(self, scalar: str, element: str) -> str:
        """What memory holds for a scalar: bools become bytes."""
        if element != BOOL_BYTE:
            return scalar
        return self.fn.op(f"arith.extui {scalar} : i1 to {element}")

    # --- loops ------------------------------------------------------------------------------------

    def generic(
        self,
        domain: Shape,
        outs: Sequence[tuple[Tensor, Index]],
        body: Yield,
        reduced: Sequence[int] = (),
    ) -> list[Tensor]:
        """A linalg.generic over `domain`, outermost loop first; `reduced` are its reductions.
        outs: what it writes, and where. body: gets the `Body` and the present elements of outs, and
        returns new ones.
        """
        fn = self.fn
        inside = Body(self, len(domain))
        names = [fn.fresh("o") for _ in outs]
        with fn.captured() as lines:
            old = [
                self.from_memory(n, BOOL_BYTE, DType.BOOL) if t.element == BOOL_BYTE else n
                for n, (t, _) in zip(names, outs, strict=True)
            ]
            new = zip(body(inside, old), outs, strict=True)
            values = [self.to_memory(v, t.element) for v, (t, _) in new]
            types = ", ".join(t.element for t, _ in outs)
            fn.line(f"linalg.yield {', '.join(values)} : {types}")
        self._cover(inside, [index for _, index in outs], domain)
        inside.tensors = [(self._trimmed(t, i, domain), i, n) for t, i, n in inside.tensors]
        maps = [index for _, index, _ in inside.tensors] + [index for _, index in outs]
        dims = ", ".join(inside.dims)
        head = ", ".join(f"affine_map<({dims}) -> ({', '.join(m)})>" for m in maps)
        kinds = ", ".join(
            '"reduction"' if i in reduced else '"parallel"' for i in range(len(domain))
        )
        results = [fn.fresh("t") for _ in outs]
        fn.line(f"{', '.join(results)} = linalg.generic {{indexing_maps = [{head}],")
        fn.line(f"    iterator_types = [{kinds}]}}")
        if inside.tensors:
            fn.line(f"    ins({_listed([t for t, _, _ in inside.tensors])})")
        fn.line(f"    outs({_listed([t for t, _ in outs])}) {{")
        args = [f"{name}: {t.element}" for t, _, name in inside.tensors]
        args += [f"{name}: {t.element}" for name, (t, _) in zip(names, outs, strict=True)]
        fn.line(f"^bb0({', '.join(args)}):")
        fn.append(lines)
        types = ", ".join(t.type for t, _ in outs)
        fn.line(f"}} -> {types}" if len(outs) == 1 else f"}} -> ({types})")
        return [Tensor(ssa, t.shape, t.element) for ssa, (t, _) in zip(results, outs, strict=True)]

    def _trimmed(self, tensor: Tensor, at: Index, domain: Shape) -> Tensor:
        """linalg wants an operand that a loop runs along to be as long as the loop."""
        loops = {f"d{i}": size for i, size in enumerate(domain)}
        sizes = tuple(loops.get(e, s) for e, s in zip(at, tensor.stored, strict=True))
        if sizes == tensor.stored:
            return tensor
        return self.part(tensor, ["0"] * len(sizes), sizes)

    def _cover(self, body: Body, outs: Sequence[Index], domain: Shape) -> None:
        """linalg reads the loops' sizes off its operands: where a loop runs over no operand's
        dimension, an operand is added that has it. Its contents are never read.
        """
        plain = {e for index in outs for e in index}
        plain |= {e for _, index, _ in body.tensors for e in index}
        missing = [i for i, d in enumerate(body.dims) if d not in plain]
        if missing:
            tensor = self.empty(tuple(domain[i] for i in missing), "f32")
            body.tensors.append((tensor, tuple(f"d{i}" for i in missing), self.fn.fresh("e")))

    def computed(self, value: Value, target: Tensor) -> Tensor:
        """A loop that computes every element of `value` into `target`."""
        dims = tuple(f"d{i}" for i in range(len(target.shape)))
        return self.generic(
            target.shape, [(target, dims)], lambda body, _: [body.read(value, body.dims)]
        )[0]

    # --- nodes ------------------------------------------------------------------------------------

    def tensor(self, value: Value) -> Tensor:
        """The tensor of a value that has one. Raises CompileError."""
        if value not in self.env:
            raise CompileError(f"{value} has no memory in its group ({value.node.loc})")
        return self.env[value]

    def constant(self, value: Value) -> Tensor:
        """A constant array."""
        array = np.asarray(value.node.attrs["value"])
        element = MEMORY[value.dtype]
        type_ = tensor_type(array.shape, element)
        ssa = self.fn.constant(f"arith.constant dense<{_dense(array, value.dtype)}> : {type_}")
        return Tensor(ssa, array.shape, element)

    def add(self, node: Node) -> None:
        """Write what `node` needs: a view, a loop, or nothing when its readers compute it."""
        from bessemer.codegen.payload.lowerings import LOWERINGS

        if node.op == "constant" and not is_splat(node):
            self.env[node.out] = self.constant(node.out)
        elif node.op in ("reshape", "slice") and node.out not in self.plan.material:
            self._view(node)
        elif is_inline(node):
            if node.out in self.plan.material:
                self.comment(node)
                self.env[node.out] = self.computed(node.out, self.target(node.out))
        elif node.op in LOWERINGS:
            self.comment(node)
            LOWERINGS[node.op](self, node)
        else:
            raise CompileError(f"{node.op} has no generic lowering ({node.loc})")

    def comment(self, node: Node) -> None:
        # Without the node's place in the model: equal layers have the same text.
        self.fn.comment(f"{node.op} {', '.join(map(str, node.types))}")

    def _view(self, node: Node) -> None:
        """A view of a tensor is a tensor; a view of something inlined is inlined."""
        source = self.env.get(node.inputs[0])
        if source is None or source.layout != "plain":
            return
        if node.op == "reshape":
            self.env[node.out] = self.reshaped(source, self.shape(node.out))
            return
        axis = len(source.shape) + integer(node, "axis")
        offsets, steps = ["0"] * len(source.shape), [1] * len(source.shape)
        start = node.attrs["start"]
        offsets[axis] = self.mixed(start if isinstance(start, Dim) else integer(node, "start"))
        steps[axis] = integer(node, "step")
        self.env[node.out] = self.part(source, offsets, self.shape(node.out), steps)


def _listed(tensors: Sequence[Tensor]) -> str:
    names = ", ".join(t.ssa for t in tensors)
    return f"{names} : {', '.join(t.type for t in tensors)}"


def _product(shape: Shape, dims: Sequence[int]) -> Size:
    total: Size = 1
    for i in dims:
        total = shape[i] * total
    return total


def _dense(array: np.ndarray, dtype: DType) -> str:
    if array.size > _READABLE_ELEMENTS:
        return f'"0x{np.ascontiguousarray(array).tobytes().hex().upper()}"'
    if array.ndim == 0 and dtype == DType.BOOL:
        return str(int(array))
    if array.ndim == 0:
        return literal(array.item(), dtype)
    return f"[{', '.join(_dense(a, dtype) for a in array)}]"
