"""Stage `groups`: the functions that the main graphs call, and how the calls run."""

from __future__ import annotations

from typing import Any

from bessemer.codegen.generate import EntryPlan, group_table
from bessemer.codegen.repeats import Segment, find_repeats
from bessemer.inspect.page import Page, columns, heading
from bessemer.inspect.subject import Subject


def groups(subject: Subject) -> Page:
    """For each entry point: its functions, and the sequence of calls with loops and barriers."""
    text, data = "", {}
    for name, entry in subject.located.generated.entries.items():
        table = [dict(row) for row in group_table(entry)]
        count = len(entry.calls)
        barriers = sum(c.barrier for c in entry.calls)
        title = f"{name}: {count} calls of {len(table)} functions, {barriers} barriers"
        text += heading(title) + _functions(table) + "\n" + sequence_text(entry)
        data[name] = {"functions": table, "calls": _calls(entry)}
    return Page(text.lstrip("\n"), data)


def _functions(table: list[dict[str, Any]]) -> str:
    rows: list[list[object]] = [
        ["function", "calls", "split", "barriers", "first of", "reads", "weights", "writes"]
    ]
    for row in table:
        memory = ["  ".join(_short(t) for t in row[k]) for k in ("reads", "weights", "writes")]
        counts = [row["function"], row["calls"], row["split"], row["barriers"]]
        rows.append([*counts, row["first"], *memory])
    return columns(rows, right=(1, 3))


def _short(memref: str) -> str:
    """`memref<?x48xf32, strided<[144, 1]>>` as `?x48xf32 strided`."""
    inner = memref.removeprefix("memref<").removesuffix(">")
    shape, *layout = inner.split(",", 1)
    return shape + (" strided" if layout else "")


def segments(entry: EntryPlan) -> list[Segment]:
    """The straight pieces and the loops of a main graph."""
    return find_repeats([call.key for call in entry.calls])


def sequence_text(entry: EntryPlan) -> str:
    """The calls in order; a bar marks the barriers, and loops are shown once."""
    lines = []
    for segment in segments(entry):
        body = entry.calls[segment.start : segment.start + segment.period]
        indent = ""
        if segment.count > 1:
            lines.append(f"{segment.count} times:\n")
            indent = "  "
        for planned in body:
            mark = "|" if planned.barrier else " "
            lines.append(f"{indent}{mark} {planned.function}\n")
    return "".join(lines)


def _calls(entry: EntryPlan) -> list[dict[str, Any]]:
    return [
        {
            "function": planned.function,
            "label": planned.call.label,
            "barrier": planned.barrier,
            "numbers": list(planned.numbers),
        }
        for planned in entry.calls
    ]
