"""Added tokens, which are found in a text before anything else, and what is put around a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bessemer.artifact.text.charsets import word_characters
from bessemer.artifact.text.format import NotConvertible, Section, TokenizerFile
from bessemer.runtime.tokenizer import Tokenizer

SINGLE_WORD, STRIP_LEFT, STRIP_RIGHT = 1, 2, 4
# A text for finding out what is put around one; every tokenizer has tokens for it.
PROBE = ""


def write_added_tokens(
    file: TokenizerFile, tokenizer: Tokenizer, added: list[Mapping[str, Any]]
) -> None:
    """Write ADDED_RAW, ADDED_NORMAL, SPECIALS and ENDS; `added`: as tokenizer.json lists them.

    The third class map is this one's.
    """
    normalizer = tokenizer.backend.normalizer
    found: dict[bool, dict[bytes, tuple[int, int, bytes]]] = {False: {}, True: {}}
    # Special ones first: that is the library's order, and of two of the same text it takes one.
    for token in sorted(added, key=lambda entry: not entry["special"]):
        text = token["content"]
        if token["normalized"] and normalizer is not None:
            text = normalizer.normalize_str(text)
        flags = SINGLE_WORD * bool(token["single_word"])
        flags |= STRIP_LEFT * bool(token["lstrip"]) | STRIP_RIGHT * bool(token["rstrip"])
        if text:
            known = found[bool(token["normalized"])]
            known.setdefault(text.encode(), (token["id"], flags, text.encode()))
    whole_words = any(token["single_word"] for token in added)
    file.class_map(word_characters().astype(np.uint8) if whole_words else None)
    for normalized, section in ((False, Section.ADDED_RAW), (True, Section.ADDED_NORMAL)):
        ordered = sorted(found[normalized].values(), key=lambda entry: entry[2])
        file.sections[section] = file.texts(ordered)
    special = [i for i in range(tokenizer.vocab_size) if tokenizer.is_special(i)]
    names = [(i, 0, (tokenizer.token(i) or "").encode()) for i in special]
    file.sections[Section.SPECIALS] = file.texts(names)
    file.sections[Section.ENDS] = np.array(sorted(tokenizer.eos_ids), "<i4").tobytes()


def write_surroundings(
    file: TokenizerFile, tokenizer: Tokenizer, processor: Mapping[str, Any] | None
) -> None:
    """Write PREFIX and SUFFIX: the ids that the post-processor puts around a text.

    Raises NotConvertible for a post-processor that does more than that.
    """
    prefix, suffix = _surroundings(processor)
    backend = tokenizer.backend
    plain = backend.encode(PROBE, add_special_tokens=False).ids
    around = backend.encode(PROBE, add_special_tokens=True).ids
    if around != [*prefix, *plain, *suffix]:
        raise NotConvertible("its post-processor does more than to add tokens at both ends")
    file.sections[Section.PREFIX] = np.array(prefix, "<i4").tobytes()
    file.sections[Section.SUFFIX] = np.array(suffix, "<i4").tobytes()


def _surroundings(processor: Mapping[str, Any] | None) -> tuple[list[int], list[int]]:
    """The ids before and behind a text."""
    if processor is None or processor["type"] == "ByteLevel":
        return [], []
    kind = processor["type"]
    if kind == "Sequence":
        prefix: list[int] = []
        suffix: list[int] = []
        for inner in processor["processors"]:
            before, behind = _surroundings(inner)
            prefix, suffix = before + prefix, suffix + behind
        return prefix, suffix
    if kind in ("BertProcessing", "RobertaProcessing"):
        return [processor["cls"][1]], [processor["sep"][1]]
    if kind != "TemplateProcessing":
        raise NotConvertible(f"it has the post-processor {kind}")
    sides: list[list[int]] = [[], []]
    side = 0
    for part in processor["single"]:
        if "Sequence" in part:
            side = 1
        else:
            sides[side] += processor["special_tokens"][part["SpecialToken"]["id"]]["ids"]
    return sides[0], sides[1]
