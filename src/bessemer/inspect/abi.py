"""Stage `abi`: how compiled code is called, and what it finds in the state memory."""

from __future__ import annotations

from typing import Any

from bessemer.artifact.layout import (
    HEADER_WORDS,
    LAYER_WORDS,
    CompressedStream,
    KVLayer,
    SharedLayer,
    StateLayout,
)
from bessemer.artifact.manifest import ABI, ENTRY_POINTS, HEADER_FILE
from bessemer.inspect.page import Page, columns, facts, heading
from bessemer.inspect.subject import Subject
from bessemer.verify.files import api_symbols

_HEADER_NAMES = (
    "magic",
    "version",
    "slot bytes",
    "entries",
    "named states",
    "capacity",
    "chunk",
    "header bytes",
)
_ENTRY_NAMES = {
    KVLayer: ("key offset", "value offset", "ring rows", "reserved"),
    SharedLayer: ("row offset", "reserved", "ring rows", "reserved"),
    CompressedStream: (
        "projected offset",
        "compressed offset",
        "projected rows",
        "compressed rows",
    ),
}


def abi(subject: Subject) -> Page:
    """Entry points, arguments, the context, the words of the state header, and model.h."""
    prefix = subject.options.prefix
    if subject.artifact is not None:
        manifest = subject.artifact.manifest
        entries, prefix = dict(manifest.entry_points), manifest.prefix
        digest, state = manifest.abi_hash, manifest.state
    else:
        entries = {e: f"{prefix}_mlir_ciface_{e}" for e in ENTRY_POINTS}
        digest, state = "of the compiled folder", subject.compilation.generated.state
    words = header_words(state)
    header = _header(subject, prefix)
    text = facts([("ABI version", ABI["version"]), ("ABI hash", digest), *entries.items()])
    text += heading("arguments, in order") + "".join(f"{i}  {a}\n" for i, a in _numbered(ABI))
    text += heading("bsm_context") + "".join(f"{field}\n" for field in ABI["context"])
    text += heading("exported beside the entry points")
    text += "".join(f"{name}\n" for name in sorted(api_symbols(prefix)))
    text += heading(f"state header, {len(words)} words of int64")
    text += columns([["word", "meaning", "value"], *([i, n, v] for i, n, v in words)], right=(0, 2))
    text += heading(HEADER_FILE) + header
    data: dict[str, Any] = {
        "version": ABI["version"],
        "hash": digest,
        "entry_points": entries,
        "arguments": ABI["arguments"],
        "context": ABI["context"],
        "symbols": sorted(api_symbols(prefix)),
        "state_header": [{"word": i, "name": n, "value": v} for i, n, v in words],
        "header": header,
    }
    return Page(text, data)


def _numbered(abi: dict[str, Any]) -> list[tuple[int, str]]:
    return list(enumerate(abi["arguments"]))


def header_words(state: StateLayout) -> list[tuple[int, str, int]]:
    """Index, meaning and value of each word that a session writes at the start of its state."""
    values = [int(w) for w in state.header()]
    names = list(_HEADER_NAMES)
    for entry in state.entries:
        what = f"layer {entry.layer}"
        if isinstance(entry, CompressedStream):
            what += f", {entry.stream}"
        names += [f"{what}: {name}" for name in _ENTRY_NAMES[type(entry)]]
    names += [f"{named.name}: offset" for named in state.named]
    assert len(_HEADER_NAMES) == HEADER_WORDS
    assert all(len(words) == LAYER_WORDS for words in _ENTRY_NAMES.values())
    return [(i, n, v) for i, (n, v) in enumerate(zip(names, values, strict=True))]


def _header(subject: Subject, prefix: str) -> str:
    kept = subject.kept(HEADER_FILE)
    if kept is not None:
        return kept
    from bessemer.codegen.abi import emit_header

    return emit_header(subject.compilation.generated, subject.name, prefix)
