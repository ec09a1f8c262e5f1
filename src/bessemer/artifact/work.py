"""What a forward call does, group by group: operations and bytes, and where a profile is kept.

Code generation writes it into every artifact as graph/work.json; the bench reads it to turn seconds
into shares of what the machine can do.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bessemer.artifact.layout import align
from bessemer.errors import ArtifactError

WORK_FILE = "graph/work.json"

# Slots of a profile that belong to no group: the time outside of a forward call (from the end of
# one to the start of the next), and waiting where a cancel is looked for.
OUTSIDE, POLL = 0, 1
_FIRST_GROUP = 2
# Words of a slot: nanoseconds, and how often. One word before all slots: when the last one ended.
_SLOT_WORDS = 2
_HEAD_WORDS = 1


@dataclass(frozen=True)
class Step:
    """One forward call: tokens [start, start + rows) of a sequence, logits of `outputs` rows."""

    start: int
    rows: int
    outputs: int = 1

    def keys(self, window: int) -> tuple[int, int]:
        """(keys seen, summed over the rows; cache rows read at least once). window: 0 = all."""
        ends = range(self.start + 1, self.start + self.rows + 1)
        seen = sum(min(end, window) if window else end for end in ends)
        last = self.start + self.rows
        return seen, min(last, window + self.rows - 1) if window else last

    def blocks(self, rate: int, limit: int) -> tuple[int, int]:
        """The same of compressed rows, each of which stands for `rate` positions and is seen when
        these are. limit: how many of them a query reads at most; 0 = all.
        """
        ends = range(self.start + 1, self.start + self.rows + 1)
        seen = sum(min(end // rate, limit) if limit else end // rate for end in ends)
        last = (self.start + self.rows) // rate
        return seen, min(last, limit * self.rows) if limit else last


@dataclass(frozen=True)
class GroupWork:
    """All calls of one group function with the same kind of rows in a forward call, added up.

    rows: what a row is: "T" a token, "R" a row whose logits are wanted, "1" once.
    flops: floating-point operations per row, a multiply-add being two; those of matrix products and
    attention, since the rest is bounded by memory.  weight_bytes: read once per forward.
    row_weight_bytes: read per row (look-ups, chosen experts), at most `row_weight_limit`.
    row_bytes: activations read and written per row.
    key_flops, key_bytes: of attention, per query row and key, and per cached key; times the calls
    with each window (0: full), {window: calls}, and those that read compressed rows, by
    "rate/limit" (see `Step.blocks`), {"4/512": calls}.
    """

    function: str
    kind: str
    calls: int
    rows: str
    flops: int = 0
    weight_bytes: int = 0
    row_weight_bytes: int = 0
    row_weight_limit: int = 0
    row_bytes: int = 0
    key_flops: int = 0
    key_bytes: int = 0
    windows: dict[int, int] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)

    def count(self, step: Step) -> int:
        """Rows of this group in a step."""
        return {"T": step.rows, "R": step.outputs}.get(self.rows, 1)

    def flops_of(self, step: Step) -> int:
        return self.flops * self.count(step) + self.key_flops * self._keys(step)[0]

    def weight_bytes_of(self, step: Step) -> int:
        chosen = self.row_weight_bytes * self.count(step)
        return self.weight_bytes + min(chosen, self.row_weight_limit)

    def cache_bytes_of(self, step: Step) -> int:
        """Bytes of the KV cache that attention reads."""
        return self.key_bytes * self._keys(step)[1]

    def _keys(self, step: Step) -> tuple[int, int]:
        """Keys and compressed rows of all calls: seen, summed over the queries; and read."""
        found = [(calls, step.keys(window)) for window, calls in self.windows.items()]
        for reach, calls in self.blocks.items():
            rate, limit = map(int, reach.split("/"))
            found.append((calls, step.blocks(rate, limit)))
        return sum(c * seen for c, (seen, _) in found), sum(c * read for c, (_, read) in found)

    def bytes_of(self, step: Step) -> int:
        """Weights, cache and activations."""
        rows = self.row_bytes * self.count(step)
        return self.weight_bytes_of(step) + self.cache_bytes_of(step) + rows


@dataclass(frozen=True)
class ProfileLayout:
    """Where a profile is kept: a table of int64 words in each thread's scratch.

    offset: bytes from the start of a thread's part.  functions: in the order of their slots.
    """

    offset: int
    functions: tuple[str, ...]

    def wait_slot(self, function: str) -> int:
        """Waiting at the barrier before the function."""
        return _FIRST_GROUP + 2 * self.functions.index(function)

    def work_slot(self, function: str) -> int:
        """The function itself."""
        return self.wait_slot(function) + 1

    @property
    def words(self) -> int:
        slots = _FIRST_GROUP + 2 * len(self.functions)
        return _HEAD_WORDS + _SLOT_WORDS * slots

    @property
    def nbytes(self) -> int:
        return align(8 * self.words)

    def read(self, words: Sequence[int]) -> dict[int, tuple[int, int]]:
        """slot -> (nanoseconds, count), of one thread's table."""
        pairs = zip(words[_HEAD_WORDS::_SLOT_WORDS], words[_HEAD_WORDS + 1 :: 2], strict=True)
        return {slot: (int(ns), int(count)) for slot, (ns, count) in enumerate(pairs)}


@dataclass(frozen=True)
class Work:
    """entries: the groups of each entry point, in order of first use.  profile: None unless the
    code was compiled to measure itself.
    """

    entries: dict[str, tuple[GroupWork, ...]]
    profile: ProfileLayout | None = None

    def flops(self, entry: str, step: Step) -> int:
        return sum(group.flops_of(step) for group in self.entries[entry])

    def weight_bytes(self, entry: str, step: Step) -> int:
        return sum(group.weight_bytes_of(step) for group in self.entries[entry])

    def cache_bytes(self, entry: str, step: Step) -> int:
        return sum(group.cache_bytes_of(step) for group in self.entries[entry])

    def to_json(self) -> str:
        data = {
            "entries": {e: [asdict(g) for g in groups] for e, groups in self.entries.items()},
            "profile": None if self.profile is None else asdict(self.profile),
        }
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Work:
        data = json.loads(text)
        found = data["profile"]
        profile = found and ProfileLayout(found["offset"], tuple(found["functions"]))
        return cls({e: tuple(map(_group, gs)) for e, gs in data["entries"].items()}, profile)


def _group(data: dict[str, Any]) -> GroupWork:
    windows = {int(window): int(calls) for window, calls in data["windows"].items()}
    return GroupWork(**{**data, "windows": windows})


def read_work(folder: Path) -> Work:
    """The work of the artifact in `folder`. Raises ArtifactError when it isn't there or damaged."""
    path = folder / WORK_FILE
    try:
        return Work.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            f"{folder} doesn't say how much work its groups do: compile the model again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged ({error}): compile the model again") from None
