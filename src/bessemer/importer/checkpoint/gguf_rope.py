"""RoPE parameters of a GGUF, as transformers' ``rope_parameters``.

Linear and YaRN scaling are metadata, longrope is two tensors of factors, and Llama 3's scaling is
one tensor of factors, from which its parameters are recovered and checked.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bessemer.importer.checkpoint.gguf_architectures import ArchitectureReader

log = logging.getLogger(__name__)

DEFAULT_BASE = 10000.0
"""What every architecture here uses if the file names no base."""

FACTOR_TOLERANCE = 1e-4
"""Relative: a factor is stored as float32 and computed in a few float32 steps; a wrong parameter
is off by per cents."""

LOW_FREQUENCY_FACTOR = 1.0
"""Llama 3's three parameters enter only as two ratios, so one may be chosen; all published
models have this one."""


def read_rope(reader: ArchitectureReader, config: dict[str, Any]) -> dict[str, Any]:
    """The ``rope_parameters`` for `config`.

    Raises:
        CheckpointError: scaling that transformers' parameters can't express.
    """
    prefix = f"{reader.architecture.name}.rope"
    metadata = reader.metadata
    base = metadata.number(f"{prefix}.freq_base")
    if not base:
        base = DEFAULT_BASE
        log.warning("%s: no %s.freq_base; taking %g", reader.path, prefix, base)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    _add_rotated_part(reader, config, rope)
    kind = metadata.string(f"{prefix}.scaling.type") or "none"
    if metadata.has(f"{prefix}.scale_linear") and kind == "none":
        kind = "linear"
    if "rope_factors_long.weight" in reader.tensors and kind in ("none", "longrope"):
        kind = "longrope"
    if "rope_freqs.weight" in reader.tensors:
        if kind != "none":
            reader.fail(f"has both {kind} RoPE scaling and a tensor rope_freqs.weight")
        kind = "llama3"
    readers = {
        "none": _no_scaling,
        "linear": _linear,
        "yarn": _yarn,
        "longrope": _longrope,
        "llama3": _llama3,
    }
    if kind not in readers:
        reader.fail(f"{prefix}.scaling.type is '{kind}', which is not supported")
    rope.update(readers[kind](reader, config, rope))
    return rope


def _add_rotated_part(
    reader: ArchitectureReader, config: dict[str, Any], rope: dict[str, Any]
) -> None:
    """Phi3 may rotate a part of each head; elsewhere the whole head is."""
    head_dim = config["head_dim"]
    key = f"{reader.architecture.name}.rope.dimension_count"
    rotated = reader.metadata.integer(key, head_dim) or head_dim
    if rotated == head_dim:
        return
    if reader.architecture.name != "phi3" or rotated > head_dim or rotated % 2:
        reader.fail(f"{key} is {rotated}, but heads have {head_dim} channels")
    rope["partial_rotary_factor"] = rotated / head_dim


def _no_scaling(
    reader: ArchitectureReader, config: dict[str, Any], rope: dict[str, Any]
) -> dict[str, Any]:
    _refuse_attention_factor(reader)
    return {}


def _linear(
    reader: ArchitectureReader, config: dict[str, Any], rope: dict[str, Any]
) -> dict[str, Any]:
    _refuse_attention_factor(reader)
    return {"rope_type": "linear", "factor": _factor(reader)}


def _yarn(
    reader: ArchitectureReader, config: dict[str, Any], rope: dict[str, Any]
) -> dict[str, Any]:
    prefix = f"{reader.architecture.name}.rope.scaling"
    _refuse_attention_factor(reader)
    result: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": _factor(reader),
        "original_max_position_embeddings": _original_context(reader),
    }
    for name in ("beta_fast", "beta_slow"):
        value = reader.metadata.number(f"{prefix}.yarn_{name}")
        if value is not None:
            result[name] = value
    return result


def _longrope(
    reader: ArchitectureReader, config: dict[str, Any], rope: dict[str, Any]
) -> dict[str, Any]:
    if reader.architecture.name != "phi3":
        reader.fail("longrope scaling is read for the architecture phi3 only")
    result: dict[str, Any] = {"rope_type": "longrope"}
    for name in ("short", "long"):
        result[f"{name}_factor"] = _factors(reader, f"rope_factors_{name}.weight", config, rope)
    original = _original_context(reader)
    result["original_max_position_embeddings"] = original
    result["factor"] = config["max_position_embeddings"] / original
    attention = reader.metadata.number("phi3.rope.scaling.attn_factor")
    if attention is not None:
        result["attention_factor"] = attention
    return result


def _llama3(
    reader: ArchitectureReader, config: dict[str, Any], rope: dict[str, Any]
) -> dict[str, Any]:
    """Recovers Llama 3's parameters from the factors that they gave.

    A frequency with wavelength L is divided by f, where 1/f = (1-s)/F + s and the ramp s is
    ``(original/L - low) / (high - low)`` clamped to 0..1: two points on the ramp give its line,
    the largest factor is F.
    """
    name = "rope_freqs.weight"
    factors = _factors(reader, name, config, rope)
    _refuse_attention_factor(reader)
    largest = max(factors)
    if all(math.isclose(factor, 1.0, rel_tol=FACTOR_TOLERANCE) for factor in factors):
        return {}
    waves = _wavelengths(rope["rope_theta"], 2 * len(factors))
    ramp = [
        (1.0 / wave, (1.0 / factor - 1.0 / largest) / (1.0 - 1.0 / largest))
        for wave, factor in zip(waves, factors, strict=True)
        if 1.0 + FACTOR_TOLERANCE < factor < largest * (1.0 - FACTOR_TOLERANCE)
    ]
    if largest > 1.0 and len(ramp) >= 2:
        (x0, y0), (x1, y1) = ramp[0], ramp[-1]
        slope = (y1 - y0) / (x1 - x0)
        offset = slope * x0 - y0
        if slope > 0 and offset > 0:
            span = LOW_FREQUENCY_FACTOR / offset
            result = {
                "rope_type": "llama3",
                "factor": _rounded(largest),
                "low_freq_factor": LOW_FREQUENCY_FACTOR,
                "high_freq_factor": _rounded(LOW_FREQUENCY_FACTOR + span),
                "original_max_position_embeddings": round(slope * span),
            }
            again = llama3_factors(result, waves)
            if all(
                math.isclose(a, b, rel_tol=FACTOR_TOLERANCE)
                for a, b in zip(again, factors, strict=True)
            ):
                return result
    reader.fail("its factors are not those of Llama 3's RoPE scaling", name)


def llama3_factors(rope: dict[str, Any], wavelengths: list[float]) -> list[float]:
    """What Llama 3's scaling divides the frequency of each wavelength by."""
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    result = []
    for wave in wavelengths:
        smooth = min(1.0, max(0.0, (original / wave - low) / (high - low)))
        result.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return result


def _wavelengths(base: float, dim: int) -> list[float]:
    return [2 * math.pi * base ** (i / dim) for i in range(0, dim, 2)]


def _rounded(value: float) -> float:
    """Parameters are round numbers in every published model; the fit is good to five digits.
    If rounding were wrong, the check against the factors would say so."""
    return round(value, 3)


def _factors(
    reader: ArchitectureReader, name: str, config: dict[str, Any], rope: dict[str, Any]
) -> list[float]:
    if name not in reader.tensors:
        reader.fail("missing", name)
    wanted = int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
    shape = reader.tensors[name].shape
    if shape != (wanted,):
        reader.fail(f"has the shape {list(shape)}, expected [{wanted}]", name)
    factors = reader.read_factors(name)
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        reader.fail("holds a factor that is not a positive number", name)
    return factors


def _factor(reader: ArchitectureReader) -> float:
    prefix = f"{reader.architecture.name}.rope"
    factor = reader.metadata.number(f"{prefix}.scaling.factor")
    if factor is None:
        factor = reader.metadata.number(f"{prefix}.scale_linear")
    if not factor or factor < 0:
        reader.fail(f"RoPE scaling without a positive {prefix}.scaling.factor")
    return factor


def _original_context(reader: ArchitectureReader) -> int:
    key = f"{reader.architecture.name}.rope.scaling.original_context_length"
    value = reader.metadata.integer(key)
    if not value:
        reader.fail(f"RoPE scaling without {key}")
    return value


def _refuse_attention_factor(reader: ArchitectureReader) -> None:
    key = f"{reader.architecture.name}.rope.scaling.attn_factor"
    if reader.metadata.number(key, 1.0) not in (0.0, 1.0):
        reader.fail(f"sets {key} to {reader.metadata.number(key)}, which is not supported here")
