"""The format of tokenizer.bin, version 2.

All numbers are little-endian. The file is a header, a table of sections, and the sections:

    header   8 bytes "BSMTOKEN", u32 version, u32 number of sections, u64 bytes of the file,
             u32 CRC-32 of everything after the header, u32 0
    table    for each section u64 offset (a multiple of 8), u64 bytes; both 0 where it is absent
    sections in the order of `Section`

Tokens are looked up by their bytes in an open hash table (FNV-1a, 64 bits, the halves xored,
linear probing, at most three quarters full). Merges are grouped by their left token and sorted by
the right one. Sets of characters are class maps: 4352 u16 give the block of 256 u8 of each 256 code
points. Regular expressions are tables of states, see `automaton`. What each section and field holds
is said in `native/runner/text.h`, whose structures the functions here write; a change of either is
a new version.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from bessemer.errors import UnsupportedError

MAGIC = b"BSMTOKEN"
VERSION = 2
ALIGNMENT = 8
HEADER = struct.Struct("<8sIIQII")
TABLE_ENTRY = struct.Struct("<QQ")
NONE = 0xFFFFFFFF
"""An id, a map or a state that is none."""

CODE_POINTS = 0x110000
BLOCK = 256
MAP_BLOCKS = CODE_POINTS // BLOCK


class Section(IntEnum):
    """The sections, by their place in the table."""

    INFO = 0
    TOKEN_ENDS = 1
    TOKENS = 2
    PIECE_ENDS = 3
    PIECES = 4
    FIRST_ENDS = 5
    FIRSTS = 6
    FLAGS = 7
    HASH = 8
    BYTE_IDS = 9
    MERGE_STARTS = 10
    MERGES = 11
    SCORES = 12
    ADDED_RAW = 13
    ADDED_NORMAL = 14
    STRINGS = 15
    SPECIALS = 16
    NORMALIZER = 17
    STAGES = 18
    AUTOMATA = 19
    AUTOMATON_DATA = 20
    CLASS_MAPS = 21
    CLASS_DATA = 22
    DECOMPOSED = 23
    COMPOSED = 24
    CODES = 25
    CHARSMAP = 26
    ENDS = 27
    PREFIX = 28
    SUFFIX = 29
    CHAT = 30


class NotConvertible(UnsupportedError):
    """A tokenizer does something that the standalone runner can't."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the standalone runner can't have this model's tokenizer: {what}. Leave out --runner; "
            "`bessemer run` takes every tokenizer"
        )


Mask = npt.NDArray[np.bool_]
Classes = npt.NDArray[np.uint8]


@dataclass
class TokenizerFile:
    """The sections of a file under construction."""

    sections: dict[Section, bytes] = field(default_factory=dict)
    _strings: bytearray = field(default_factory=bytearray)
    _places: dict[bytes, int] = field(default_factory=dict)
    _maps: list[bytes] = field(default_factory=list)
    _map_data: bytearray = field(default_factory=bytearray)

    def string(self, text: bytes) -> tuple[int, int]:
        """Offset and size of `text` in STRINGS; the same text is kept once."""
        if text not in self._places:
            self._places[text] = len(self._strings)
            self._strings += text
        return self._places[text], len(text)

    def class_map(self, classes: Classes | None) -> int:
        """The number of a class map; classes: [CODE_POINTS] a class of each code point, or None for
        a map that isn't there.
        """
        number = len(self._maps)
        if classes is None:
            self._maps.append(struct.pack("<III", 0, 0, 0))
            return number
        content = classes.astype(np.uint8).tobytes()
        blocks: dict[bytes, int] = {}
        index = [
            blocks.setdefault(content[at : at + BLOCK], len(blocks))
            for at in range(0, CODE_POINTS, BLOCK)
        ]
        index_offset = len(self._map_data)
        self._map_data += np.array(index, "<u2").tobytes()
        blocks_offset = len(self._map_data)
        self._map_data += b"".join(blocks)
        self._maps.append(struct.pack("<III", index_offset, blocks_offset, len(blocks)))
        return number

    def texts(self, entries: Sequence[tuple[int, int, bytes]]) -> bytes:
        """(id, flags, text) as `file_text` records."""
        packed = bytearray()
        for token_id, flags, text in entries:
            packed += struct.pack("<IIII", token_id, flags, *self.string(text))
        return bytes(packed)

    def strings_by_id(self, ends: Section, data: Section, texts: Sequence[bytes]) -> None:
        """A table of ends and the bytes of the texts."""
        sizes = np.fromiter(map(len, texts), np.int64, len(texts))
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        if bounds[-1] >= NONE:
            raise NotConvertible("its tokens take more than 4 GiB")
        self.sections[ends] = bounds.astype("<u4").tobytes()
        self.sections[data] = b"".join(texts)

    def to_bytes(self) -> bytes:
        """The whole file."""
        self.sections[Section.STRINGS] = bytes(self._strings)
        self.sections[Section.CLASS_MAPS] = b"".join(self._maps)
        self.sections[Section.CLASS_DATA] = bytes(self._map_data)
        offset = HEADER.size + TABLE_ENTRY.size * len(Section)
        table, body = bytearray(), bytearray()
        for section in Section:
            content = self.sections.get(section, b"")
            padding = -(offset + len(body)) % ALIGNMENT
            if content:
                body += bytes(padding)
                table += TABLE_ENTRY.pack(offset + len(body), len(content))
                body += content
            else:
                table += TABLE_ENTRY.pack(0, 0)
        rest = bytes(table + body)
        size = HEADER.size + len(rest)
        return HEADER.pack(MAGIC, VERSION, len(Section), size, zlib.crc32(rest), 0) + rest


def checksum(content: bytes) -> int:
    """The CRC-32 that the header of a finished file records: it tells tokenizer files apart."""
    return int(HEADER.unpack_from(content)[4])
