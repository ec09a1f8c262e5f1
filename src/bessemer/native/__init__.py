"""The C that ships inside every library: its place, and the headers that `model.h` is made of."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
# In the order in which `model.h` has them. Each has types, which all models of a program share, and
# functions, which a prefix renames.
PUBLIC_HEADERS = ("bessemer.h", "api.h", "sampler.h")

_FUNCTION = re.compile(r"^BSM_API\b[^;(]*?\b(bsm_\w+)\s*\(", re.MULTILINE)


def public_header() -> str:
    """The public headers as one text that needs the system's headers alone."""
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in PUBLIC_HEADERS]
    return re.sub(r'^#include ".*\n\n?', "", "\n".join(texts), flags=re.MULTILINE)


def public_functions() -> frozenset[str]:
    """The names of the functions that the public headers declare."""
    return frozenset(_FUNCTION.findall(public_header()))


def prefixed_header(prefix: str) -> str:
    """The public headers of a library whose functions begin with `prefix`.

    Only functions, the ABI hash and the guards around functions get it: a program of two models has
    the types once.
    """
    text = public_header()
    if not prefix:
        return text
    names = "|".join(sorted(public_functions(), key=len, reverse=True))
    text = re.sub(rf"\b({names})\b", rf"{prefix}\1", text)
    text = re.sub(r"\bBESSEMER_(?!\w*TYPES_H\b)\w+_H\b", rf"{prefix.upper()}\g<0>", text)
    return re.sub(r"\bBSM_ABI_HASH\b", f"{prefix.upper()}ABI_HASH", text)
