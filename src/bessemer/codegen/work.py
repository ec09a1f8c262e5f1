"""How much work the calls of an entry point are: see `artifact.work`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from bessemer.artifact.layout import STORAGE_BYTES, CompressedStream, StateLayout, align
from bessemer.artifact.work import GroupWork, ProfileLayout
from bessemer.codegen.group import ELEMENT_BYTES, ROWS, GroupSpec, Operand
from bessemer.codegen.main_graph import PlannedCall
from bessemer.codegen.program import Call
from bessemer.graph.dims import Dim


def group_work(calls: Sequence[PlannedCall], state: StateLayout) -> tuple[GroupWork, ...]:
    """The work of each function, over all its calls with the same kind of rows."""
    found: dict[tuple[str, str], GroupWork] = {}
    for planned in calls:
        one = _call_work(planned.function, planned.call, state)
        key = (one.function, one.rows)
        found[key] = _added(found[key], one) if key in found else one
    return tuple(found.values())


def _added(a: GroupWork, b: GroupWork) -> GroupWork:
    windows, blocks = Counter(a.windows), Counter(a.blocks)
    windows.update(b.windows)
    blocks.update(b.blocks)
    summed = ("calls", "flops", "weight_bytes", "row_weight_bytes", "row_weight_limit", "row_bytes")
    sums = {n: getattr(a, n) + getattr(b, n) for n in summed}
    return replace(a, windows=dict(windows), blocks=dict(blocks), **sums)


def _call_work(function: str, call: Call, state: StateLayout) -> GroupWork:
    spec = call.spec
    rows = str(call.rows.terms[0][0]) if isinstance(call.rows, Dim) else "1"
    bare = GroupWork(function, spec.kind, 1, rows, row_bytes=_row_bytes(spec, rows))
    if spec.kind in _FORMULAS:
        return _FORMULAS[spec.kind](bare, call, state)
    weights = sum(o.nbytes for o in spec.operands if o.role == "weight")
    return replace(bare, weight_bytes=weights)


def _row_bytes(spec: GroupSpec, rows: str) -> int:
    """Activations per row; of a group that runs once, all of them."""
    per_row = [o for o in spec.operands if o.role in ("in", "out")]
    if rows != "1":
        per_row = [o for o in per_row if o.shape and o.shape[0] == ROWS]
    return sum(o.nbytes for o in per_row)


def _sizes(operand: Operand) -> list[int]:
    return [int(s) for s in operand.shape[1:]]


def _linear(work: GroupWork, call: Call, state: StateLayout) -> GroupWork:
    """x[rows, K] by panels [(2,) N/32, K, 32]."""
    x = call.spec.operands[0]
    parts = 2 if call.spec.kind == "glu_linear" else 1
    n, k = _sizes(call.spec.operands[-1])[-1], _sizes(x)[-1]
    weights = sum(o.nbytes for o in call.spec.operands if o.role == "weight")
    return replace(work, flops=2 * parts * n * k, weight_bytes=weights)


def _linear_parts(work: GroupWork, call: Call, state: StateLayout) -> GroupWork:
    """x[1, K] by panels [N/32, K, 32]."""
    w = call.spec.operands[1]
    return replace(work, flops=2 * math.prod(map(int, w.shape)), weight_bytes=w.nbytes)


def _embedding(work: GroupWork, call: Call, state: StateLayout) -> GroupWork:
    """One row of the table per token."""
    table, _, out = call.spec.operands
    row = _sizes(out)[-1] * ELEMENT_BYTES[table.element]
    return replace(work, row_weight_bytes=row, row_weight_limit=table.nbytes)


def _experts(work: GroupWork, call: Call, state: StateLayout) -> GroupWork:
    """The chosen experts of each row; at most all of them are read."""
    operands = call.spec.operands
    at = next(i for i, o in enumerate(operands) if o.role == "weight")
    x, indices, w = operands[0], operands[at - 1], operands[at]
    parts = 2 if call.spec.attr("gated") else 1
    choices, n, k = _sizes(indices)[0], _sizes(call.spec.operands[-1])[-1], _sizes(x)[-1]
    one = w.nbytes // int(w.shape[0])
    return replace(
        work,
        flops=2 * parts * choices * n * k,
        row_weight_bytes=choices * one,
        row_weight_limit=w.nbytes,
    )


def _attention(work: GroupWork, call: Call, state: StateLayout) -> GroupWork:
    """Scores and weighted values of every query head; keys and values of every KV head."""
    spec = call.spec
    widths = int(spec.attr("key_width")) + int(spec.attr("value_width"))
    heads = _sizes(spec.operands[0])[-2]
    return replace(
        work,
        key_flops=2 * heads * widths,
        key_bytes=int(spec.attr("kv_heads")) * widths * STORAGE_BYTES[state.kv_dtype],
        windows={_literals(call)["window"]: 1},
    )


def _literals(call: Call) -> dict[str, int]:
    return dict(zip(call.spec.literals, call.literals, strict=True))


def _compressed_attention(work: GroupWork, call: Call, state: StateLayout) -> GroupWork:
    """Scores and weighted values over the rows of a window and over compressed rows, all or the
    chosen ones; keys are values, and all heads share them.
    """
    spec, numbers = call.spec, _literals(call)
    heads, width = _sizes(spec.operands[0])
    blocks: dict[str, int] = {}
    if "older" in numbers:
        limit = _sizes(spec.operands[-2])[-1] if spec.attr("has_indices") else 0
        blocks[f"{_stream(state, numbers['older']).rate}/{limit}"] = 1
    return replace(
        work,
        key_flops=4 * heads * width,
        key_bytes=width * STORAGE_BYTES[state.kv_dtype],
        windows={numbers["window"]: 1},
        blocks=blocks,
    )


def _index(work: GroupWork, call: Call, state: StateLayout) -> GroupWork:
    """Scores of every compressed row of the index, by every head."""
    heads, width = _sizes(call.spec.operands[0])
    rate = _stream(state, _literals(call)["entry"]).rate
    return replace(
        work,
        key_flops=2 * heads * width,
        key_bytes=width * STORAGE_BYTES[state.kv_dtype],
        blocks={f"{rate}/0": 1},
    )


def _stream(state: StateLayout, entry: int) -> CompressedStream:
    found = state.entries[entry]
    assert isinstance(found, CompressedStream)
    return found


_FORMULAS: dict[str, Callable[[GroupWork, Call, StateLayout], GroupWork]] = {
    "linear": _linear,
    "glu_linear": _linear,
    "linear_parts": _linear_parts,
    "embedding": _embedding,
    "expert_linear": _experts,
    "flash_attention": _attention,
    "decode_attention": _attention,
    "compressed_attention": _compressed_attention,
    "decode_compressed_attention": _compressed_attention,
    "index_topk": _index,
    "index_scores": _index,
}


def profile_layout(thread_bytes: int, functions: Sequence[str]) -> ProfileLayout:
    """A profile's place behind what the groups need of a thread's scratch."""
    return ProfileLayout(align(thread_bytes), tuple(functions))
