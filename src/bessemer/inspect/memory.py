"""Stage `memory`: the arena of activations over a call, the state, and totals by context."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from bessemer.artifact.layout import (
    CompressedStream,
    KVLayer,
    ScratchLayout,
    SharedLayer,
    StateLayout,
)
from bessemer.codegen.generate import EntryPlan
from bessemer.codegen.memory import Lifetime
from bessemer.errors import BessemerError
from bessemer.inspect.groups import segments
from bessemer.inspect.page import Page, columns, facts, heading, size_text
from bessemer.inspect.subject import Subject
from bessemer.inspect.weights import stored_weights

CHART_COLUMNS = 64
# Layers that are named one by one.
LISTED = 3
# Contexts for which totals are shown, besides the model's own.
CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def memory(subject: Subject) -> Page:
    """Where activations, keys and values live, and how much memory a session takes."""
    state, scratch = layouts(subject)
    weight_bytes = max((w.offset + w.nbytes for w in stored_weights(subject)), default=0)
    data: dict[str, Any] = {
        "weights_bytes": weight_bytes,
        "scratch": {"shared": scratch.shared_bytes, "thread": scratch.thread_bytes},
        "state": {"bytes": state.nbytes, "kv_bytes_per_token": state.kv_bytes_per_token()},
    }
    text = ""
    try:
        entries = subject.compilation.generated.entries
    except BessemerError as error:
        text += heading("arena") + f"not shown: {error}\n"
    else:
        for name, entry in entries.items():
            text += heading(f"{name}: arena of {entry.arena.nbytes:,} bytes") + chart(entry)
        data["arena"] = {name: _arena_data(entry) for name, entry in entries.items()}
    text += heading("state of a session") + state_text(state)
    text += heading("totals by context, one session") + _totals(state, scratch, weight_bytes)
    return Page(text.lstrip("\n"), data)


def layouts(subject: Subject) -> tuple[StateLayout, ScratchLayout]:
    if subject.artifact is not None:
        return subject.artifact.manifest.state, subject.artifact.manifest.scratch
    generated = subject.compilation.generated
    return generated.state, generated.scratch


def chart(entry: EntryPlan) -> str:
    """One line for each buffer: its size and place, and the calls during which it holds something.
    Of a loop over layers the first turn is shown; the others have the same places.
    """
    count = max(len(entry.calls), 1)
    repeated = [
        (s.start + s.period, s.start + s.period * s.count) for s in segments(entry) if s.count > 1
    ]
    lives = [x for x in entry.arena.lifetimes if not any(a <= x.first < b for a, b in repeated)]
    rows: list[list[object]] = [["buffer of", "rows", "bytes", "offset", f"calls 0 to {count - 1}"]]
    for life in lives:
        rows.append(
            [
                _writer(entry, life),
                life.buffer.rows or 1,
                life.nbytes,
                entry.arena.offsets[life.buffer],
                _bar(life, count),
            ]
        )
    hidden = len(entry.arena.lifetimes) - len(lives)
    note = f"and {hidden} buffers of the loop's other turns, at the same places\n" if hidden else ""
    return columns(rows, right=(2, 3)) + note


def _writer(entry: EntryPlan, life: Lifetime) -> str:
    call = entry.calls[life.first]
    return f"{call.function} {'x'.join(map(str, life.buffer.shape))}"


def _bar(life: Lifetime, count: int) -> str:
    """The lifetime among `count` calls. A buffer always shows at least one mark."""
    width = min(CHART_COLUMNS, count)
    start = life.first * width // count
    end = max(start, min(life.last, count - 1) * width // count)
    return "." * start + "#" * (end - start + 1) + "." * (width - end - 1)


def _arena_data(entry: EntryPlan) -> dict[str, Any]:
    return {
        "bytes": entry.arena.nbytes,
        "buffers": [
            {
                "shape": [str(s) for s in life.buffer.shape],
                "element": life.buffer.element,
                "bytes": life.nbytes,
                "offset": entry.arena.offsets[life.buffer],
                "first_call": life.first,
                "last_call": life.last,
            }
            for life in entry.arena.lifetimes
        ],
    }


def state_text(state: StateLayout) -> str:
    """What a session keeps, and how much of it."""
    pairs: list[tuple[str, object]] = [
        ("KV dtype", state.kv_dtype),
        ("capacity", f"{state.capacity} tokens, in steps of at most {state.chunk}"),
        ("header", f"{state.header_bytes:,} bytes"),
        ("KV per token", f"{state.kv_bytes_per_token():,} bytes"),
        ("in all", f"{state.nbytes:,} bytes ({size_text(state.nbytes)})"),
    ]
    text = facts(pairs)
    for table in (_kv_layers(state), _shared_layers(state), _streams(state)):
        if len(table) > 1:
            text += "\n" + columns(table, right=tuple(range(1, len(table[0]))))
    if state.named:
        named: list[list[object]] = [["state", "dtype", "shape", "bytes"]]
        named += [[n.name, n.dtype, "x".join(map(str, n.shape)), n.nbytes] for n in state.named]
        text += "\n" + columns(named, right=(3,))
    return text


def _kv_layers(state: StateLayout) -> list[list[object]]:
    rows: list[list[object]] = [["layers", "KV heads", "key", "value", "window", "rows kept"]]
    for layers, layer in _alike(state.layers):
        window = layer.window or "full"
        kept = state.ring_rows(layer)
        rows.append([layers, layer.kv_heads, layer.key_width, layer.value_width, window, kept])
    return rows


def _shared_layers(state: StateLayout) -> list[list[object]]:
    """Layers whose keys are their values: they keep a window of positions."""
    rows: list[list[object]] = [["layers, keys = values", "width", "window", "rows kept", "bytes"]]
    for layers, layer in _alike(state.shared):
        held = sum(state.region_bytes(layer))
        rows.append([layers, layer.width, layer.window, state.ring_rows(layer), held])
    return rows


def _streams(state: StateLayout) -> list[list[object]]:
    """Compressed rows, and the ring of projected rows that they are pooled from; bytes of one
    layer.
    """
    head = ["compressed", "width", "positions a row", "rows", "bytes", "rows pending", "bytes"]
    rows: list[list[object]] = [list(head)]
    for stream in sorted({s.stream for s in state.streams}, reverse=True):
        alike = _alike([s for s in state.streams if s.stream == stream])
        for layers, one in alike:
            pending, held = state.region_bytes(one)
            numbers = [one.width, one.rate, state.compressed_rows(one), held]
            rows.append([f"{stream} {layers}", *numbers, state.pending_rows(one), pending])
    return rows


E = TypeVar("E", KVLayer, SharedLayer, CompressedStream)


def _alike(entries: Sequence[E]) -> list[tuple[str, E]]:
    """Entries that differ in their layer alone, with the layers' numbers as "0-29" or "0, 2, 4"."""
    runs: list[list[E]] = []
    for entry in entries:
        same = [r for r in runs if replace(r[0], layer=entry.layer) == entry]
        if same:
            same[0].append(entry)
        else:
            runs.append([entry])
    return [(_numbers([entry.layer for entry in run]), run[0]) for run in runs]


def _numbers(layers: Sequence[int]) -> str:
    """Sorted numbers, ranges of neighbours as "a-b", equal steps as "a, b, ... z"."""
    steps = {b - a for a, b in itertools.pairwise(layers)}
    if len(steps) == 1 and steps != {1} and len(layers) > LISTED:
        return f"{layers[0]}, {layers[1]}, ... {layers[-1]}"
    parts: list[list[int]] = []
    for layer in layers:
        if parts and parts[-1][-1] + 1 == layer:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _totals(state: StateLayout, scratch: ScratchLayout, weight_bytes: int) -> str:
    """A session's memory grows with the context that it is compiled for."""
    contexts = sorted({state.capacity, *(c for c in CONTEXTS if c < state.capacity)})
    rows: list[list[object]] = [
        ["context", "state", "activations, shared", "per thread", "weights", "all, 1 thread"]
    ]
    for context in contexts:
        held = replace(state, capacity=context).nbytes
        parts = [held, scratch.shared_bytes, scratch.thread_bytes, weight_bytes]
        rows.append([context, *map(size_text, parts), size_text(sum(parts))])
    return columns(rows, right=(0, 1, 2, 3, 4, 5))
