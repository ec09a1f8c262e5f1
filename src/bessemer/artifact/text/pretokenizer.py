"""The pre-tokenizer of a tokenizer as stages; each splits what the one before left."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from bessemer.artifact.text.automaton import Automaton, build_automaton
from bessemer.artifact.text.charsets import numeric, punctuation
from bessemer.artifact.text.format import NONE, NotConvertible, Section, TokenizerFile
from bessemer.artifact.text.patterns import Chars, Node, Repeat, literal, parse
from bessemer.runtime.pieces import byte_of_char

SPLIT, BYTES, METASPACE = 1, 2, 3
INVERTED, OVER_BYTES, PREFIX_SPACE, PREFIX_FIRST, SPLIT_MARKS = 1, 2, 4, 8, 16
BEHAVIORS = {
    "Isolated": 0,
    "Removed": 1,
    "Contiguous": 2,
    "MergedWithPrevious": 3,
    "MergedWithNext": 4,
}
MOST_STAGES = 16
# What the library's ByteLevel pre-tokenizer splits by, when it is to split (GPT-2's pattern).
BYTE_LEVEL_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WHITESPACE_PATTERN = r"\w+|[^\w\s]+"


class Automata:
    """The automata of a file; their class maps come after those with a fixed number."""

    def __init__(self) -> None:
        self._all: list[tuple[Automaton, bool]] = []

    def add(self, automaton: Automaton, over_bytes: bool = False) -> int:
        self._all.append((automaton, over_bytes))
        return len(self._all) - 1

    def write(self, file: TokenizerFile) -> None:
        """Write AUTOMATA and AUTOMATON_DATA."""
        data, rows = bytearray(), bytearray()
        for automaton, over_bytes in self._all:
            table_at = len(data)
            data += automaton.table.astype("<u2").tobytes()
            byte_map = NONE
            if over_bytes:
                byte_map = len(data)
                chars = {byte: ord(char) for char, byte in byte_of_char().items()}
                data += automaton.classes[[chars[byte] for byte in range(256)]].tobytes()
            class_map = NONE if over_bytes else file.class_map(automaton.classes)
            states = len(automaton.table)
            rows += struct.pack(
                "<IIIII", states, automaton.class_count, table_at, class_map, byte_map
            )
        file.sections[Section.AUTOMATA] = bytes(rows)
        file.sections[Section.AUTOMATON_DATA] = bytes(data)


class _Stages:
    """Collects stages. over_bytes: a ByteLevel stage has been, and text is bytes since."""

    def __init__(self, file: TokenizerFile, automata: Automata) -> None:
        self.file, self.automata = file, automata
        self.packed: list[bytes] = []
        self.over_bytes = False

    def add(
        self, kind: int, flags: int = 0, number: int = 0, behavior: int = 0, text: str = ""
    ) -> None:
        place = self.file.string(text.encode())
        self.packed.append(struct.pack("<IIIIII", kind, flags, number, behavior, *place))

    def split(self, pattern: Node, what: str, behavior: str, invert: bool = False) -> None:
        if behavior not in BEHAVIORS:
            raise NotConvertible(f"its pre-tokenizer splits by the behaviour {behavior}")
        number = self.automata.add(build_automaton(pattern, what), self.over_bytes)
        flags = INVERTED * invert | OVER_BYTES * self.over_bytes
        self.add(SPLIT, flags, number, BEHAVIORS[behavior])

    def step(self, step: Mapping[str, Any] | None) -> None:
        """One pre-tokenizer of tokenizer.json; a sequence is taken apart."""
        if step is None:
            return
        kind = step["type"]
        if kind == "Sequence":
            for inner in step["pretokenizers"]:
                self.step(inner)
        elif kind == "Split":
            pattern = step["pattern"]
            if "Regex" in pattern:
                node, what = parse(pattern["Regex"]), pattern["Regex"]
            else:
                node, what = literal(pattern["String"]), pattern["String"]
            name = f"its pre-tokenizer's pattern {what!r}"
            self.split(node, name, step["behavior"], step["invert"])
        elif kind == "ByteLevel":
            self._byte_level(step)
        elif kind == "Digits":
            one = Chars(numeric())
            self.split(one if step["individual_digits"] else Repeat(one, 1, None), kind, "Isolated")
        elif kind == "Punctuation":
            self.split(Chars(punctuation()), kind, step["behavior"])
        elif kind == "Metaspace":
            self._metaspace(step)
        elif kind == "Whitespace":
            self.split(parse(WHITESPACE_PATTERN), kind, "Removed", invert=True)
        elif kind == "WhitespaceSplit":
            self.split(parse(r"\s"), kind, "Removed")
        else:
            raise NotConvertible(f"it has the pre-tokenizer {kind}")

    def _byte_level(self, step: Mapping[str, Any]) -> None:
        if self.over_bytes:
            raise NotConvertible("it has the pre-tokenizer ByteLevel twice")
        if step["add_prefix_space"]:
            self.add(BYTES, PREFIX_SPACE)
        if step.get("use_regex", True):
            self.split(parse(BYTE_LEVEL_PATTERN), "ByteLevel", "Isolated")
        self.over_bytes = True

    def _metaspace(self, step: Mapping[str, Any]) -> None:
        scheme = step.get("prepend_scheme", "always")
        if scheme not in ("always", "first", "never") or self.over_bytes:
            raise NotConvertible(f"it has a Metaspace with the scheme {scheme}")
        flags = {"always": PREFIX_SPACE, "first": PREFIX_FIRST, "never": 0}[scheme]
        flags |= SPLIT_MARKS * step.get("split", True)
        self.add(METASPACE, flags, text=step["replacement"])


def write_pretokenizer(
    file: TokenizerFile, pre_tokenizer: Mapping[str, Any] | None, automata: Automata
) -> bool:
    """Write STAGES; returns whether the model sees bytes (a ByteLevel stage) or characters.

    Raises NotConvertible for a pre-tokenizer that isn't known.
    """
    stages = _Stages(file, automata)
    stages.step(pre_tokenizer)
    if len(stages.packed) > MOST_STAGES:
        raise NotConvertible(f"its pre-tokenizer has more than {MOST_STAGES} stages")
    file.sections[Section.STAGES] = b"".join(stages.packed)
    return stages.over_bytes
