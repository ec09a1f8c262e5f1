"""What a program for macOS says about itself, read from its bytes: nothing here can run it."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

# <mach-o/loader.h>
MAGIC_64 = 0xFEEDFACF
CPUS = {0x0100000C: "aarch64", 0x01000007: "x86_64"}
EXECUTE = 2
PIE = 0x200000
LOAD_DYLIB, CODE_SIGNATURE, BUILD_VERSION, MAIN = 0xC, 0x1D, 0x32, 0x80000028
# <Kernel/kern/cs_blobs.h>; numbers of signatures are big-endian.
SUPER_BLOB, CODE_DIRECTORY = 0xFADE0CC0, 0xFADE0C02
AD_HOC, SHA256 = 0x2, 2


@dataclass(frozen=True)
class MachO:
    """kind: MH_EXECUTE and so on.  commands: the bodies of load commands by their number."""

    cpu: str
    kind: int
    flags: int
    commands: dict[int, list[bytes]]
    data: bytes

    @property
    def libraries(self) -> list[str]:
        return [
            body[struct.unpack_from("<I", body, 8)[0] :].split(b"\0")[0].decode()
            for body in self.commands.get(LOAD_DYLIB, [])
        ]

    @property
    def least_system(self) -> tuple[int, int]:
        """The oldest macOS that it runs on."""
        (body,) = self.commands[BUILD_VERSION]
        version = struct.unpack_from("<I", body, 12)[0]
        return version >> 16, version >> 8 & 0xFF

    def check_signature(self) -> None:
        """Apple's processors run nothing unsigned: the hash of each page must be right."""
        (body,) = self.commands[CODE_SIGNATURE]
        offset, size = struct.unpack_from("<II", body, 8)
        blob = self.data[offset : offset + size]
        magic, _, count = struct.unpack_from(">III", blob)
        assert magic == SUPER_BLOB
        places = [struct.unpack_from(">II", blob, 12 + 8 * i) for i in range(count)]
        (directory,) = [blob[at:] for kind, at in places if kind == 0]
        magic, _, _, flags, hashes, _, _, pages, limit = struct.unpack_from(">9I", directory)
        assert (magic, flags & AD_HOC) == (CODE_DIRECTORY, AD_HOC)
        assert (directory[36], directory[37], limit) == (32, SHA256, offset)
        page = 1 << directory[39]
        for i in range(pages):
            wanted = hashlib.sha256(self.data[i * page : min((i + 1) * page, limit)]).digest()
            assert directory[hashes + 32 * i : hashes + 32 * (i + 1)] == wanted
        assert pages == -(-limit // page)


def read_mach_o(path: Path) -> MachO:
    data = path.read_bytes()
    magic, cpu, _, kind, count, _, flags, _ = struct.unpack_from("<8I", data)
    assert magic == MAGIC_64
    commands: dict[int, list[bytes]] = {}
    at = 32
    for _ in range(count):
        number, size = struct.unpack_from("<II", data, at)
        commands.setdefault(number, []).append(data[at : at + size])
        at += size
    return MachO(CPUS[cpu], kind, flags, commands, data)
