"""Layer 2: memory.

The weight table describes weights.bin, every tensor has the bytes that the compiler stored, state
and scratch are laid out without overlap as the ABI hash says, and this machine can run the code.
With the checkpoint at hand: every stored weight is, bit for bit, what its expression over the
checkpoint's tensors gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from bessemer.artifact.layout import (
    ALIGN,
    HEADER_WORDS,
    LAYER_WORDS,
    STATE_MAGIC,
    STORAGE_BYTES,
    CompressedStream,
    Entry,
    KVLayer,
    ScratchLayout,
    SharedLayer,
    StateLayout,
    StoredWeight,
)
from bessemer.artifact.manifest import Manifest
from bessemer.artifact.reader import Artifact, Check, check_target
from bessemer.artifact.writer import Read, expression_blocks
from bessemer.graph import Value
from bessemer.verify.report import MEMORY, Outcome, Report

Progress = Callable[[str, int, int], None]
FAILURES_SHOWN = 8


def check_layouts(report: Report, artifact: Artifact) -> bool:
    """Layouts by themselves, without the compiler; whether this machine can run the code."""
    manifest = artifact.manifest
    report.attempt(MEMORY, "weight table", lambda: _weight_table(manifest))
    report.attempt(MEMORY, "state layout", lambda: _state(manifest.state))
    report.attempt(MEMORY, "scratch layout", lambda: _scratch(manifest.scratch))

    def target() -> Outcome:
        check_target(manifest, artifact.folder)
        needed = ", ".join(manifest.required_features) or "no more than the baseline"
        return True, f"{manifest.target.get('triple')}: {needed}"

    return report.attempt(MEMORY, "target", target)


def _weight_table(manifest: Manifest) -> Outcome:
    end, gaps = 0, 0
    for weight in sorted(manifest.weights, key=lambda w: w.offset):
        if weight.offset < end or weight.offset % ALIGN:
            return False, f"{weight.name} at {weight.offset} overlaps or isn't aligned"
        size = int(np.prod(weight.stored_shape, dtype=np.int64)) * STORAGE_BYTES[weight.dtype]
        if size != weight.nbytes:
            return False, f"{weight.name}: {weight.nbytes} bytes for {list(weight.stored_shape)}"
        gaps += weight.offset - end
        end = weight.offset + weight.nbytes
    count = len(manifest.weights)
    return count > 0, f"{count} tensors without overlap, {end:,} bytes, {gaps:,} of them padding"


def _state(state: StateLayout) -> Outcome:
    """Every region of the state lies inside it, by itself, at an aligned place."""
    words = [int(w) for w in state.header()]
    if words[0] != STATE_MAGIC or len(words) != state.header_words:
        return False, "its header is not the one that compiled code reads"
    slot_bytes = words[2]
    regions: list[tuple[int, int, str]] = []
    for i, entry in enumerate(state.entries):
        first, second, rows, _ = words[HEADER_WORDS + LAYER_WORDS * i :][:LAYER_WORDS]
        needed = _rows_needed(state, entry)
        if rows < min(needed, state.capacity):
            return False, f"layer {entry.layer} keeps {rows} rows, and needs {needed}"
        sizes = state.region_bytes(entry)
        for start, nbytes, what in zip((first, second), sizes, _PARTS[type(entry)], strict=True):
            if nbytes:
                regions.append((start, start + nbytes, f"{what} of layer {entry.layer}"))
    named = words[HEADER_WORDS + LAYER_WORDS * len(state.entries) :]
    regions += [(o, o + n.nbytes, n.name) for o, n in zip(named, state.named, strict=True)]
    end = 0
    for start, stop, name in sorted(regions):
        if start < end or start % ALIGN or stop > slot_bytes:
            return False, f"{name} at {start} overlaps, isn't aligned or leaves the slot"
        end = stop
    detail = f"{len(regions)} regions, {state.nbytes:,} bytes for {state.capacity} tokens"
    return True, f"{detail}, {state.kv_dtype} KV, {state.kv_bytes_per_token():,} bytes a token"


_PARTS: dict[type, tuple[str, str]] = {
    KVLayer: ("keys", "values"),
    SharedLayer: ("rows", "rows"),
    CompressedStream: ("projected rows", "compressed rows"),
}


def _rows_needed(state: StateLayout, entry: Entry) -> int:
    """Rows of an entry's ring that a chunk needs at once."""
    if isinstance(entry, CompressedStream):
        return state.chunk - 1 + entry.reach
    return entry.window + state.chunk - 1 if entry.window else state.capacity


def _scratch(scratch: ScratchLayout) -> Outcome:
    good = scratch.shared_bytes % ALIGN == 0 and scratch.thread_bytes % ALIGN == 0
    return good, f"{scratch.shared_bytes:,} bytes shared, {scratch.thread_bytes:,} a thread"


def check_hashes(report: Report, found: Iterable[Check]) -> bool:
    """The table of weights.bin and each tensor's SHA-256, from the reader's checks."""
    checks = [c for c in found if c.name.startswith("weight ")]
    failed = [c for c in checks if not c.ok]
    for check in failed[:FAILURES_SHOWN]:
        report.add(MEMORY, check.name, False, check.detail)
    if len(failed) > FAILURES_SHOWN:
        more = len(failed) - FAILURES_SHOWN
        report.add(MEMORY, "weight hashes", False, f"{more} more tensors have changed")
    if not failed:
        tensors = len(checks) - 1  # one of the checks is that of the table
        report.add(MEMORY, "weight hashes", True, f"SHA-256 of the table and {tensors} tensors")
    return not failed


def check_tables(
    report: Report,
    manifest: Manifest,
    weights: Sequence[StoredWeight],
    state: StateLayout,
    scratch: ScratchLayout,
) -> bool:
    """The tables are those that compiling the same source again gives."""

    def compare() -> Outcome:
        expected, found = {w.name: w for w in weights}, {w.name: w for w in manifest.weights}
        for name in sorted(expected.keys() ^ found.keys()):
            where = "artifact" if name in expected else "source"
            return False, f"the {where} has no weight {name}"
        for name, weight in found.items():
            if expected[name] != weight:
                return False, f"{name} is {weight}, the source gives {expected[name]}"
        if manifest.state != state:
            return False, "the state layout is another one than the source gives"
        if manifest.scratch != scratch:
            return False, f"scratch is {manifest.scratch}, the source gives {scratch}"
        return True, f"{len(found)} weights, state and scratch as compiled from the source again"

    return report.attempt(MEMORY, "tables", compare)


def check_bits(
    report: Report,
    artifact: Artifact,
    expressions: Mapping[str, Value],
    read: Read,
    progress: Progress = lambda stage, done, total: None,
) -> bool:
    """Every stored weight is the packed value of its expression over the checkpoint, bit for bit.
    A part of one weight is held in memory at a time.
    """
    weights = artifact.manifest.weights
    total = sum(w.nbytes for w in weights)

    def compare() -> Outcome:
        done, wrong = 0, []
        for weight in weights:
            difference = _difference(artifact, weight, expressions, read)
            if difference:
                wrong.append(f"{weight.name}: {difference}")
            done += weight.nbytes
            progress("checking weights", done, total)
        if wrong:
            shown = "; ".join(wrong[:FAILURES_SHOWN])
            return False, f"{len(wrong)} of {len(weights)} weights differ: {shown}"
        return True, f"{len(weights)} weights equal the checkpoint's, packed, bit for bit"

    return report.attempt(MEMORY, "weight bits", compare)


def _difference(
    artifact: Artifact, weight: StoredWeight, expressions: Mapping[str, Value], read: Read
) -> str:
    """Where a stored weight first differs from what the checkpoint gives, or ""."""
    expression = expressions.get(weight.name)
    if expression is None:
        return "the source doesn't have it"
    if expression.shape != weight.shape:
        return f"shape {list(weight.shape)}, the checkpoint gives {list(expression.shape)}"
    stored = artifact.stored(weight.name)
    at = 0
    for block in expression_blocks(expression, read, weight):
        have = stored[at : at + block.nbytes]
        if not np.array_equal(have, block):
            first = at + int(np.argmax(have != block))
            return f"byte {first} of {weight.nbytes} is the first that differs"
        at += block.nbytes
    return "" if at == weight.nbytes else f"{weight.nbytes} bytes for {at}"
