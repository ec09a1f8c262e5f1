"""Weight formats: how numbers are laid out in storage and how they become float32.

A format is known by its lower-case name (``"f16"``, ``"q4_k"``), the one that checkpoints, the
graph and manifests use. `storage_format` looks a name up; plain floating-point formats are formats
whose block is one element. The block layouts are those of GGUF files (ggml's ``block_*`` structs).
"""

from __future__ import annotations

from bessemer.quantize.blocks import BlockFormat, decode_blocks
from bessemer.quantize.floats import (
    BF16,
    F16,
    F32,
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
)
from bessemer.quantize.integers import I32, I64
from bessemer.quantize.kquants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from bessemer.quantize.q4 import Q4_0, Q4_1
from bessemer.quantize.q5 import Q5_0, Q5_1
from bessemer.quantize.q8_0 import Q8_0

FORMATS: dict[str, BlockFormat] = {
    fmt.name: fmt
    for fmt in (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)
}
"""Every format of weights that can be decoded, by name."""

INTEGER_FORMATS: dict[str, BlockFormat] = {fmt.name: fmt for fmt in (I32, I64)}
"""Formats of tables of whole numbers, by name."""

FLOAT_FORMATS = frozenset({"f32", "f16", "bf16"})
"""The formats that are not quantised: one element a block, no scale."""


def storage_format(name: str) -> BlockFormat:
    """The format called `name`. Raises KeyError with the known names if there is none."""
    try:
        return INTEGER_FORMATS.get(name) or FORMATS[name]
    except KeyError:
        raise KeyError(f"unknown weight format {name!r}; known: {', '.join(FORMATS)}") from None


__all__ = [
    "FLOAT_FORMATS",
    "FORMATS",
    "INTEGER_FORMATS",
    "BlockFormat",
    "bf16_to_f32",
    "decode_blocks",
    "f16_to_f32",
    "f32_to_bf16",
    "f32_to_f16",
    "storage_format",
]
