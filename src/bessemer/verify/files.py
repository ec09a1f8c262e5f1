"""Layer 1: files and symbols.

The folder holds what its manifest lists, byte for byte; the library exports the entry points and
the pool and nothing else, and needs nothing beyond the C library; the header declares what the
library exports; the archive holds the same code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from bessemer.artifact.manifest import (
    ARCHIVE_FILE,
    HEADER_FILE,
    LIBRARY_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Manifest,
)
from bessemer.artifact.reader import Artifact, Check, read_manifest
from bessemer.native import public_functions
from bessemer.verify.binaries import read_archive, read_library
from bessemer.verify.report import FILES, Outcome, Report

REQUIRED_FILES = (LIBRARY_FILE, ARCHIVE_FILE, HEADER_FILE, WEIGHTS_FILE)

# All that compiled code may ask of a system: the C library, its mathematics and its threads, by
# the names they have on Linux and macOS.
SYSTEM_LIBRARIES = re.compile(r"(lib(c|m|pthread)\.so[.\d]*|ld-linux[\w.-]*|libSystem[\w.]*dylib)")
# What the toolchains themselves may add to a shared object's symbols.
TOOLCHAIN_SYMBOLS = frozenset(
    {"_init", "_fini", "_edata", "_end", "__bss_start", "_mh_dylib_header", "__dso_handle"}
)
NAMES_SHOWN = 6


def check_manifest(report: Report, folder: Path) -> Artifact | None:
    """The artifact, if its manifest is whole; what can't be read can't be checked further."""
    found: list[Manifest] = []

    def read() -> Outcome:
        manifest = read_manifest(folder)
        found.append(manifest)
        return True, f"format and ABI hash {manifest.abi_hash[:12]} hold together"

    report.attempt(FILES, MANIFEST_FILE, read)
    return Artifact(folder, found[0]) if found else None


def check_files(report: Report, artifact: Artifact, found: Iterable[Check]) -> bool:
    """Sizes and hashes of the files, from the reader's checks; whether all are right."""
    sizes = [c for c in found if c.name.startswith("file ")]
    hashes = [c for c in found if c.name.startswith("hash ")]
    missing = [f for f in REQUIRED_FILES if f not in artifact.manifest.files]
    if missing:
        report.add(FILES, "listed", False, f"the manifest doesn't list {', '.join(missing)}")
    good = _summary(report, "presence and sizes", sizes, f"{len(sizes)} files")
    if hashes:
        good &= _summary(report, "checksums", hashes, f"SHA-256 of {len(hashes)} files")
    return good and not missing


def _summary(report: Report, name: str, checks: list[Check], detail: str) -> bool:
    """One line when all hold, and one for each that does not."""
    failed = [c for c in checks if not c.ok]
    for check in failed:
        report.add(FILES, check.name, False, check.detail)
    if not failed:
        report.add(FILES, name, True, detail)
    return not failed


def check_symbols(report: Report, artifact: Artifact) -> None:
    """The library, the archive and the header have the same entry points."""
    manifest = artifact.manifest
    expected = {*manifest.entry_points.values(), *api_symbols(manifest.prefix)}
    levels = {name for level in manifest.levels for name in level.entry_points.values()}
    inside = expected | levels
    report.attempt(FILES, f"symbols of {LIBRARY_FILE}", lambda: _exports(artifact, inside))
    report.attempt(FILES, f"needs of {LIBRARY_FILE}", lambda: _needs(artifact))
    report.attempt(FILES, ARCHIVE_FILE, lambda: _archive(artifact, inside))
    report.attempt(FILES, HEADER_FILE, lambda: _header(artifact, expected))


def api_symbols(prefix: str = "") -> frozenset[str]:
    """The functions of model.h, as a library with this prefix names them."""
    return frozenset(prefix + name for name in public_functions())


def _exports(artifact: Artifact, expected: set[str]) -> Outcome:
    info = read_library(artifact.library)
    arch = str(artifact.manifest.target.get("triple", "")).split("-")[0]
    if info.machine and arch and info.machine != arch:
        return False, f"it holds {info.machine} code, and the manifest says {arch}"
    exported = set(info.exports) - TOOLCHAIN_SYMBOLS
    missing, foreign = sorted(expected - exported), sorted(exported - expected)
    if missing:
        return False, f"missing: {_names(missing)}"
    if foreign:
        return False, f"not of the ABI, yet visible: {_names(foreign)}"
    entries = " and ".join(artifact.manifest.entry_points.values())
    functions = len(api_symbols(artifact.manifest.prefix))
    return True, f"{entries}; {functions} of the C API; nothing else"


def _needs(artifact: Artifact) -> Outcome:
    needed = read_library(artifact.library).needed
    foreign = [n for n in needed if not SYSTEM_LIBRARIES.fullmatch(n)]
    if foreign:
        return False, f"it needs {_names(foreign)} besides the C library"
    return True, ", ".join(needed) or "no other library"


def _archive(artifact: Artifact, expected: set[str]) -> Outcome:
    info = read_archive(artifact.folder / ARCHIVE_FILE)
    missing = sorted(expected - info.symbols)
    if missing:
        return False, f"its index lacks {_names(missing)}"
    return True, f"{len(info.members)} members: {_names(list(info.members))}"


def _header(artifact: Artifact, expected: set[str]) -> Outcome:
    text = (artifact.folder / HEADER_FILE).read_text(encoding="utf-8")
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    missing = sorted(n for n in expected if not re.search(rf"\b{n}\s*\([^;{{]*\)\s*;", code))
    if missing:
        return False, f"it doesn't declare {_names(missing)}"
    wrong = [
        f"{name} {defined}, the manifest {value}"
        for name, value in header_sizes(artifact.manifest).items()
        if (defined := _defined(text, name)) != value
    ]
    if wrong:
        return False, f"sizes differ: {'; '.join(wrong)}"
    return True, f"declares {len(expected)} functions; its sizes are those of the manifest"


def header_sizes(manifest: Manifest) -> dict[str, int]:
    """The numbers that the header defines, by macro."""
    tag = (manifest.prefix or "BSM_").upper()
    return {
        f"{tag}VOCAB": manifest.vocab_size,
        f"{tag}HIDDEN": manifest.hidden_size,
        f"{tag}CONTEXT": manifest.state.capacity,
        f"{tag}CHUNK": manifest.state.chunk,
        f"{tag}STATE_BYTES": manifest.state.nbytes,
        f"{tag}SCRATCH_SHARED_BYTES": manifest.scratch.shared_bytes,
        f"{tag}SCRATCH_THREAD_BYTES": manifest.scratch.thread_bytes,
        f"{tag}WEIGHTS_BYTES": manifest.weights_nbytes,
    }


def _defined(text: str, name: str) -> int | None:
    found = re.search(rf"^#define {re.escape(name)} (\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def _names(names: list[str] | tuple[str, ...]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    more = len(names) - NAMES_SHOWN
    return shown + (f" and {more} more" if more > 0 else "")
