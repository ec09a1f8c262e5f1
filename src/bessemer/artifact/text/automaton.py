"""A pattern as a table of states.

A backtracking matcher tries alternatives in order and takes the first way that leads to a match.
Here a state is the list of all ways that are still open, in that order (as in RE2: Cox, "Regular
Expression Matching in the Wild", 2010, https://swtch.com/~rsc/regexp/regexp3.html). A way that
matches ends all ways of lower preference; those of higher preference go on, and if one of them
matches later, that match counts. So the last match that is seen before no way is left is the one
that backtracking finds, at one step a character.

Looking one character ahead is a condition on the next step: a step sees the next character's class,
so that whether a match ends *before* it is a mark on the step (`MATCH_BEFORE`). The end of the text
is a class of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bessemer.artifact.text.format import (
    CODE_POINTS,
    Classes,
    Mask,
    NotConvertible,
)
from bessemer.artifact.text.patterns import Chars, Choice, Look, Node, Repeat, Sequence

MATCH_BEFORE = 0x8000
DEAD, START = 0, 1
# Real patterns have 10 to 200 states; more would be a mistake.
MOST_STATES = 4096
MOST_CLASSES = 256

State = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Automaton:
    """table: uint16[states, classes + 1], the next state and `MATCH_BEFORE`; the last column is
    for the end of the text.  classes: the class of each code point.
    """

    table: npt.NDArray[np.uint16]
    classes: Classes

    @property
    def class_count(self) -> int:
        return self.table.shape[1] - 1


@dataclass(frozen=True)
class _Step:
    """A node of the pattern's graph. kind: "set", "look", "split" or "match"."""

    kind: str
    nexts: tuple[int, ...] = ()
    mask: int = -1
    negative: bool = False


class _Graph:
    """The pattern's ways: nodes with their successors in order of preference."""

    def __init__(self) -> None:
        self.steps: list[_Step] = [_Step("match")]
        self.masks: list[Mask] = []

    def add(self, step: _Step) -> int:
        self.steps.append(step)
        return len(self.steps) - 1

    def mask(self, mask: Mask) -> int:
        for index, known in enumerate(self.masks):
            if np.array_equal(known, mask):
                return index
        self.masks.append(mask)
        return len(self.masks) - 1

    def build(self, node: Node, after: int) -> int:
        """The entry of `node` when `after` follows it."""
        if isinstance(node, Chars):
            return self.add(_Step("set", (after,), self.mask(node.mask)))
        if isinstance(node, Look):
            return self.add(_Step("look", (after,), self.mask(node.mask), node.negative))
        if isinstance(node, Sequence):
            for item in reversed(node.items):
                after = self.build(item, after)
            return after
        if isinstance(node, Choice):
            return self.add(_Step("split", tuple(self.build(o, after) for o in node.options)))
        return self._repeat(node, after)

    def _repeat(self, node: Repeat, after: int) -> int:
        if node.possessive:
            self._check_possessive(node, after)
        if node.most is None:
            loop = self.add(_Step("split"))
            body = self.build(node.item, loop)
            if loop in self.closure([body]):
                raise NotConvertible("its pre-tokenizer's pattern repeats what may be nothing")
            self.steps[loop] = _Step("split", (body, after))
            entry = loop
        else:
            entry = after
            for _ in range(node.most - node.least):
                entry = self.add(_Step("split", (self.build(node.item, entry), after)))
        for _ in range(node.least):
            entry = self.build(node.item, entry)
        return entry

    def _check_possessive(self, node: Repeat, after: int) -> None:
        """What it took is never given back: the same as greedy where giving back can't help."""
        reached = [self.steps[i] for i in self.closure([after])]
        if any(step.kind == "match" for step in reached):
            return  # what follows may be nothing, so the first try succeeds
        apart = isinstance(node.item, Chars) and all(
            step.kind == "set" and not (self.masks[step.mask] & node.item.mask).any()
            for step in reached
        )
        if not apart:
            raise NotConvertible("its pre-tokenizer's pattern needs a possessive repetition")

    def closure(self, nodes: Iterable[int], seen: set[int] | None = None) -> list[int]:
        """Sets, looks and the match that can be reached without a character, in order; what comes
        after a match is cut off.
        """
        seen = set() if seen is None else seen
        found: list[int] = []
        stack = list(nodes)[::-1]
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            step = self.steps[node]
            if step.kind == "split":
                stack.extend(reversed(step.nexts))
                if not step.nexts:
                    found.append(node)  # a loop that is still being built
                continue
            found.append(node)
            if step.kind == "match":
                break
        return found


def build_automaton(pattern: Node, what: str) -> Automaton:
    """The table of a pattern. `what` names it in errors.

    Raises NotConvertible for a pattern that may match nothing, or that is too large.
    """
    graph = _Graph()
    entry = graph.build(pattern, 0)
    classes, inside = _classes(graph.masks)
    count = inside.shape[1]
    if count > MOST_CLASSES:
        raise NotConvertible(f"{what} tells too many sets of characters apart")
    numbers: dict[State, int] = {(): DEAD}
    states: list[State] = [()]

    def number(state: State) -> int:
        if state not in numbers:
            numbers[state] = len(states)
            states.append(state)
            if len(states) > MOST_STATES:
                raise NotConvertible(f"{what} needs too many states")
        return numbers[state]

    number(tuple(graph.closure([entry])))
    rows: list[list[int]] = []
    while len(rows) < len(states):
        state = states[len(rows)]
        row = []
        for column in range(count + 1):
            following, matched = _step(graph, state, inside, column)
            row.append(number(following) | (MATCH_BEFORE if matched else 0))
        rows.append(row)
    table = np.array(rows, np.uint16)
    if (table[START] & MATCH_BEFORE).any():
        raise NotConvertible(f"{what} may match nothing")
    return Automaton(table, classes)


def _classes(masks: list[Mask]) -> tuple[Classes, npt.NDArray[np.bool_]]:
    """The class of each code point: equal where no set tells them apart; and bool[sets, classes]
    whether a class is inside a set.
    """
    if len(masks) > 64:
        raise NotConvertible("its pre-tokenizer's pattern has too many sets of characters")
    signature = np.zeros(CODE_POINTS, np.uint64)
    for index, mask in enumerate(masks):
        signature |= mask.astype(np.uint64) << np.uint64(index)
    # Neighbours are mostly alike: only where the signature changes is there something to sort.
    begins = np.flatnonzero(np.concatenate([[True], signature[1:] != signature[:-1]]))
    kinds, of_run = np.unique(signature[begins], return_inverse=True)
    lengths = np.diff(np.append(begins, CODE_POINTS))
    classes = np.repeat(of_run.reshape(-1), lengths)
    bits = np.arange(len(masks), dtype=np.uint64)[:, None]
    inside = (kinds[None, :] >> bits & np.uint64(1)).astype(np.bool_)
    return classes.astype(np.uint8), inside


def _step(
    graph: _Graph, state: State, inside: npt.NDArray[np.bool_], column: int
) -> tuple[State, bool]:
    """The state after a character of class `column` (the number of classes: the end of the text),
    and whether a match ends before it.
    """
    at_end = column == inside.shape[1]
    reached: list[int] = []
    entered: set[int] = set()
    walked: set[int] = set()

    def walk(nodes: Iterable[int]) -> bool:
        """Go on from nodes that stand before the character; whether a match was met."""
        for node in nodes:
            if node in walked:
                continue
            walked.add(node)
            step = graph.steps[node]
            if step.kind == "match":
                return True
            fits = not at_end and bool(inside[step.mask, column])
            if step.kind == "set":
                if fits:
                    reached.extend(graph.closure(step.nexts, entered))
            elif fits != step.negative and walk(graph.closure(step.nexts)):
                return True
        return False

    matched = walk(state)
    return tuple(_cut(graph, reached)), matched


def _cut(graph: _Graph, nodes: list[int]) -> list[int]:
    """Up to the first match: what comes after it has no chance."""
    for index, node in enumerate(nodes):
        if graph.steps[node].kind == "match":
            return nodes[: index + 1]
    return nodes
