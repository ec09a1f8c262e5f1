"""What a shared library and an archive say about themselves: symbols, dependencies, members.

ELF and ar files are read here, so that an artifact can be checked on a machine without a compiler;
Mach-O libraries are asked through the LLVM tools.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from bessemer.errors import ArtifactError

_ELF_MAGIC = b"\x7fELF"
_MACHO_MAGICS = (b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_AR_MAGIC = b"!<arch>\n"

# ELF e_machine of the architectures that Bessemer compiles for.
ELF_MACHINES = {62: "x86_64", 183: "aarch64", 243: "riscv64"}
_SHARED_OBJECT = 3
_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_DT_NEEDED = 1
_BINDS = (1, 2)  # global, weak
_HIDDEN = (1, 2)  # internal, hidden

_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")
_AR_HEADER = struct.Struct("16s12s6s6s8s10s2s")


@dataclass(frozen=True)
class LibraryInfo:
    """machine: architecture, "" where unknown.  exports: symbols that others can see.
    needed: libraries that it asks for.
    """

    machine: str
    exports: frozenset[str]
    needed: tuple[str, ...]


@dataclass(frozen=True)
class ArchiveInfo:
    """members: file names in order.  symbols: those of its index."""

    members: tuple[str, ...]
    symbols: frozenset[str]


def read_library(path: Path) -> LibraryInfo:
    """Raises ArtifactError when `path` is no whole shared library."""
    data = path.read_bytes()
    if data.startswith(_MACHO_MAGICS):
        return _read_macho(path)
    if not data.startswith(_ELF_MAGIC):
        raise ArtifactError(f"{path.name} is no shared library: it begins with {data[:4]!r}")
    try:
        return _read_elf(data)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path.name} is damaged: {error}") from None


def _read_elf(data: bytes) -> LibraryInfo:
    kind, machine, _, _, _, table, _, _, _, _, size, count, _ = _HEADER.unpack_from(data)
    if data[4:6] != b"\x02\x01" or kind != _SHARED_OBJECT:
        raise ArtifactError("not a 64-bit little-endian shared object")
    if size != _SECTION.size or not count:
        raise ArtifactError("it has no section table")
    sections = [_SECTION.unpack_from(data, table + i * size) for i in range(count)]
    exports: set[str] = set()
    needed: list[str] = []
    for _, type_, _, _, offset, nbytes, link, _, _, _ in sections:
        if type_ not in (_SHT_DYNSYM, _SHT_DYNAMIC):
            continue
        body = _span(data, offset, nbytes)
        strings = _span(data, sections[link][4], sections[link][5])
        if type_ == _SHT_DYNSYM:
            exports |= _exported(body, strings)
        else:
            entries = _DYNAMIC.iter_unpack(body)
            needed += [_text(strings, value) for tag, value in entries if tag == _DT_NEEDED]
    return LibraryInfo(ELF_MACHINES.get(machine, ""), frozenset(exports), tuple(needed))


def _exported(symbols: bytes, strings: bytes) -> set[str]:
    found = set()
    for name, info, other, section, _, _ in _SYMBOL.iter_unpack(symbols):
        if section and info >> 4 in _BINDS and other & 3 not in _HIDDEN:
            found.add(_text(strings, name))
    return found


def _span(data: bytes, offset: int, nbytes: int) -> bytes:
    if offset + nbytes > len(data):
        raise IndexError(f"a section ends at {offset + nbytes} of {len(data)} bytes")
    return data[offset : offset + nbytes]


def _text(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(b"\0", offset)].decode()


def _read_macho(path: Path) -> LibraryInfo:
    from bessemer.backend.tools import require_llvm_tool, run_tool

    names = run_tool(
        [require_llvm_tool("llvm-nm"), "-gU", "--format=just-symbols", str(path)]
    ).split()
    lines = run_tool([require_llvm_tool("llvm-otool"), "-L", str(path)]).splitlines()
    libraries = [line.split(" (")[0].strip() for line in lines if line.startswith("\t")]
    own = {path.name, path.stem}
    needed = [Path(x).name for x in libraries if Path(x).name not in own]
    # Mach-O puts an underscore before every C name.
    return LibraryInfo("", frozenset(n.removeprefix("_") for n in names), tuple(needed))


def read_archive(path: Path) -> ArchiveInfo:
    """Raises ArtifactError when `path` is no whole archive with an index."""
    data = path.read_bytes()
    if not data.startswith(_AR_MAGIC):
        raise ArtifactError(f"{path.name} is no archive: it begins with {data[:8]!r}")
    try:
        return _read_ar(data)
    except (struct.error, IndexError, ValueError) as error:
        raise ArtifactError(f"{path.name} is damaged: {error}") from None


def _read_ar(data: bytes) -> ArchiveInfo:
    members: list[str] = []
    symbols: set[str] = set()
    long_names = b""
    at = len(_AR_MAGIC)
    while at < len(data):
        raw, _, _, _, _, length, end = _AR_HEADER.unpack_from(data, at)
        if end != b"`\n":
            raise ValueError(f"no member at {at}")
        at += _AR_HEADER.size
        body = _span(data, at, int(length))
        at += len(body) + len(body) % 2
        name = raw.rstrip(b" ")
        if name in (b"/", b"/SYM64/"):
            symbols |= _gnu_index(body, 8 if name == b"/SYM64/" else 4)
        elif name == b"//":
            long_names = body
        elif name.startswith(b"#1/"):  # BSD: the name is the first bytes of the member
            length_of_name = int(name[3:])
            text = body[:length_of_name].rstrip(b"\0").decode()
            if text.startswith("__.SYMDEF"):
                symbols |= _bsd_index(body[length_of_name:], 8 if "64" in text else 4)
            else:
                members.append(text)
        elif name.startswith(b"/"):
            start = int(name[1:])
            members.append(long_names[start : long_names.index(b"/\n", start)].decode())
        else:
            members.append(name.rstrip(b"/").decode())
    return ArchiveInfo(tuple(members), frozenset(symbols))


def _gnu_index(body: bytes, width: int) -> set[str]:
    """Big-endian count, as many offsets, then the names."""
    count = int.from_bytes(body[:width], "big")
    names = body[width * (count + 1) :].split(b"\0")[:count]
    return {n.decode() for n in names}


def _bsd_index(body: bytes, width: int) -> set[str]:
    """Little-endian bytes of (name, offset) pairs, the pairs, bytes of names, the names."""
    size = int.from_bytes(body[:width], "little")
    pairs = body[width : width + size]
    strings = body[2 * width + size :]
    starts = [
        int.from_bytes(pairs[i : i + width], "little") for i in range(0, len(pairs), 2 * width)
    ]
    return {_text(strings, s).removeprefix("_") for s in starts}
