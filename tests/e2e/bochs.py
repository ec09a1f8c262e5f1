"""An emulated PC with AVX-512: Bochs, running static Linux programs.

Starting Linux there takes minutes, so `bochs_pc` has a system of its own: `boot.S` is the first
sector of the PC's disk, `entry.S` and `system.c` answer what the programs ask of Linux.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from bessemer.backend.tools import run_tool
from tests.e2e.cross import zig_environment

SOURCES = Path(__file__).with_name("bochs_pc")
BIOS = Path("/usr/share/bochs/BIOS-bochs-latest")
VIDEO_BIOS = Path("/usr/share/bochs/VGABIOS-lgpl-latest")
# Bochs's names of processors with AVX-512, without and with VNNI; and of one that has AVX2 at most.
SKYLAKE, ICELAKE, HASWELL = "corei7_skylake_x", "corei7_icelake_u", "corei7_haswell_4770"

SECTOR = 512
TRACK, HEADS = 63, 16
# Addresses in the PC: the system, and the files; a program is at 16 MB.
SYSTEM_AT, FILES_AT = 0x200000, 0x8000000
NAME_BYTES = 112
FIRST_AT = 0x1C0  # in the first sector: the address to enter, and the table of pieces

# No screen: of Debian's displays `rfb` needs no terminal, and waits for nobody.
_CONFIGURATION = """\
plugin_ctrl: speaker=0, parallel=0, gameport=0, iodebug=1
memory: guest={memory}, host={memory}
romimage: file={bios}, options=fastboot
vgaromimage: file={video_bios}
ata0: enabled=1, ioaddr1=0x1f0, ioaddr2=0x3f0, irq=14
ata0-master: type=disk, path={work}/disk, mode=flat, cylinders={cylinders}, heads=16, spt=63
boot: disk
cpu: model={cpu}, ips=50000000
clock: sync=none
port_e9_hack: enabled=1
display_library: rfb, options="timeout=0"
log: {work}/log
panic: action=fatal
error: action=report
info: action=ignore
debug: action=ignore
"""


@dataclass(frozen=True)
class Done:
    """What a program gave."""

    status: int
    stdout: bytes
    stderr: bytes


def require() -> None:
    """Skip the test where Bochs is missing."""
    if shutil.which("bochs") is None or not VIDEO_BIOS.is_file():
        pytest.skip("bochs is not installed (Debian's package bochs)")
    if not BIOS.is_file():
        pytest.skip(f"{BIOS} is not there (Debian's package bochsbios)")


def run(
    files: Mapping[str, Path | bytes],
    commands: Sequence[Sequence[object]],
    work: Path,
    *,
    cpu: str = ICELAKE,
    memory: int = 512,
    timeout: float = 300,
) -> list[Done]:
    """Start a PC with `files`, run the commands there in turn and say what they gave.

    work: a new folder for the disk and the logs.  memory: MB.
    """
    require()
    work.mkdir(parents=True)
    lists = ("".join(f"{word}\0" for word in words) + "\0" for words in commands)
    content = {
        name: found if isinstance(found, bytes) else found.read_bytes()
        for name, found in {"": "".join(lists).encode() + b"\0", **files}.items()
    }
    cylinders = _write_disk(work / "disk", _archive(content, memory << 20))
    names = {"bios": BIOS, "video_bios": VIDEO_BIOS, "cpu": cpu, "work": work, "memory": memory}
    text = _CONFIGURATION.format(cylinders=cylinders, **names)
    (work / "bochsrc").write_text(text)
    done = _read(_boot(work, timeout))
    assert len(done) == len(commands), (done, (work / "log").read_text()[-3000:])
    return done


def _boot(work: Path, timeout: float) -> bytes:
    """Bochs's standard output when it has ended."""
    # Debian's Bochs has its debugger, which waits for a command.
    (work / "go").write_text("c\n")
    command = ["bochs", "-q", "-f", str(work / "bochsrc"), "-rc", str(work / "go")]
    with (work / "output").open("wb") as output, (work / "messages").open("wb") as messages:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=messages,
            timeout=timeout,
            check=False,
        )
    return (work / "output").read_bytes()


def _read(output: bytes) -> list[Done]:
    """The programs' results, from the records that `system.c` describes."""
    _, _, rest = output.partition(b"START\n")
    done: list[Done] = []
    outputs = {b"O": b"", b"E": b""}
    while rest[:1] in (b"O", b"E", b"X"):
        kind = rest[:1]
        number, _, rest = rest[1:].partition(b"\n")
        if kind == b"X":
            done.append(Done(int(number), outputs[b"O"], outputs[b"E"]))
            outputs = {b"O": b"", b"E": b""}
        else:
            outputs[kind] += rest[: int(number)]
            rest = rest[int(number) :]
    return done


def _archive(files: Mapping[str, bytes], memory: int) -> bytes:
    """The files as `system.c` finds them in memory."""
    head = bytearray(struct.pack("<QQ", len(files), memory))
    at = -(-(len(head) + len(files) * (NAME_BYTES + 16)) // 4096) * 4096
    parts = []
    for name, content in files.items():
        assert len(name) < NAME_BYTES
        head += struct.pack(f"<{NAME_BYTES}sQQ", name.encode(), at, len(content))
        parts.append(content + bytes(-len(content) % 4096))
        at += len(parts[-1])
    return b"".join([head, bytes(-len(head) % 4096), *parts])


def _write_disk(path: Path, files: bytes) -> int:
    """The disk's contents. Returns its cylinders."""
    first = bytearray(_boot_sector())
    entry, system = _system()
    table, at = [entry], 1
    with path.open("wb") as disk:
        disk.seek(SECTOR)
        for address, content in ((SYSTEM_AT, system), (FILES_AT, files)):
            sectors = -(-len(content) // SECTOR)
            table += [address, at, sectors]
            disk.write(content + bytes(-len(content) % SECTOR))
            at += sectors
        cylinders = -(-at // (TRACK * HEADS))
        disk.truncate(cylinders * TRACK * HEADS * SECTOR)
        disk.seek(0)
        struct.pack_into(f"<{len(table)}I", first, FIRST_AT, *table)
        disk.write(first)
    return cylinders


@cache
def _boot_sector() -> bytes:
    """The machine code of `boot.S`."""
    with tempfile.TemporaryDirectory() as folder:
        linked, plain = Path(folder) / "boot.o", Path(folder) / "boot.bin"
        _zig("cc", "-target", "x86-freestanding", "-c", SOURCES / "boot.S", "-o", linked)
        _zig("objcopy", "-O", "binary", "-j", ".text", linked, plain)
        return plain.read_bytes()


@cache
def _system() -> tuple[int, bytes]:
    """The entry of `system.c`, and the memory from SYSTEM_AT on that it wants."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "system"
        words = ["-target", "x86_64-freestanding", "-nostdlib", "-static", "-O1", "-s"]
        words += [
            "-mcpu=x86_64-x87-mmx-sse-sse2+soft_float",
            "-mno-red-zone",
            "-fno-builtin",
            "-fno-stack-protector",
        ]
        words += ["-fno-sanitize=all", "-fno-pic", "-Wall", "-Wextra", "-Werror"]
        words += [f"-Wl,--image-base={SYSTEM_AT:#x}", "-Wl,-e,entry"]
        sources = (SOURCES / "entry.S", SOURCES / "system.c")
        _zig("cc", *words, *sources, "-o", out)
        elf = out.read_bytes()
    entry, parts_at = struct.unpack_from("<QQ", elf, 24)
    (parts,) = struct.unpack_from("<H", elf, 56)
    memory = bytearray()
    for number in range(parts):
        kind, _, offset, address, _, in_file, in_memory = struct.unpack_from(
            "<IIQQQQQ", elf, parts_at + 56 * number
        )
        if kind == 1:
            start = address - SYSTEM_AT
            memory += bytes(max(0, start + in_memory - len(memory)))
            memory[start : start + in_file] = elf[offset : offset + in_file]
    return entry, bytes(memory)


def _zig(*words: object) -> None:
    run_tool([sys.executable, "-m", "ziglang", *map(str, words)], env=zig_environment())
