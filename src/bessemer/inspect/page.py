"""What a stage shows: text for people, data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Page:
    """text: ends with a newline.  data: the same as JSON types."""

    text: str
    data: Any


def columns(rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Aligned columns, the first row being the header. Nothing is cut, so that it pipes well.

    right: columns that are aligned to the right (numbers).
    """
    if not rows:
        return ""
    cells = [[str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for row in cells:
        padded = [
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip() + "\n")
    return "".join(lines)


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """Name and value, one pair a line."""
    width = max(len(name) for name, _ in pairs)
    return "".join(f"{name:<{width}}  {value}\n" for name, value in pairs)


def heading(title: str) -> str:
    return f"\n{title}\n{'-' * len(title)}\n"


def size_text(nbytes: int) -> str:
    """Bytes for people, in powers of 1024."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
