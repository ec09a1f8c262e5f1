"""Rotary frequencies by formula: the plain ones, and YaRN's, which stretch the slow ones.

With base b and rotary width n, pair i turns by b^(-2i/n) per position. YaRN leaves the fast pairs
as they are, divides the slow ones by `factor`, and blends the pairs between two correction
dimensions linearly. (Peng et al., YaRN: Efficient Context Window Extension, 2023.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from bessemer.errors import UnsupportedError

# What YaRN counts as fast and slow where a config doesn't say: turns over the original context.
BETA_FAST = 32.0
BETA_SLOW = 1.0
# The ramp is at least this wide, so that equal correction dimensions don't divide by zero.
LEAST_RAMP = 0.001


def correction_dimension(width: int, context: int, turns: float, base: float) -> float:
    """The pair, as a real number, that turns `turns` times over `context` positions."""
    return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))


def correction_range(
    width: int, context: int, base: float, beta_fast: float, beta_slow: float
) -> tuple[int, int]:
    """The pairs between which frequencies are blended, outwards to whole ones, within 0 and
    width - 1."""
    low = math.floor(correction_dimension(width, context, beta_fast, base))
    high = math.ceil(correction_dimension(width, context, beta_slow, base))
    return max(low, 0), min(high, width - 1)


def ramp(low: float, high: float, pairs: int) -> torch.Tensor:
    """f32[pairs]: 1 up to pair `low` (the original frequency), 0 from pair `high` on."""
    rise = (torch.arange(pairs, dtype=torch.float32) - low) / max(LEAST_RAMP, high - low)
    return 1 - rise.clamp(0, 1)


def inverse_frequencies(width: int, parameters: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """f32[width / 2] of one kind of layer, and what cos and sin are multiplied by.

    parameters: an entry of a config's `rope_parameters`: rope_theta, rope_type "default" or "yarn".

    Raises UnsupportedError for other kinds of scaling.
    """
    base = float(parameters["rope_theta"])
    exponents = torch.arange(0, width, 2, dtype=torch.float32) / width
    plain = 1.0 / base**exponents
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return plain, 1.0
    if kind != "yarn" or parameters.get("mscale") or parameters.get("mscale_all_dim"):
        raise UnsupportedError(
            f"rotary scaling {kind!r} with {dict(parameters)} is not known to this architecture"
        )
    factor = float(parameters["factor"])
    low, high = correction_range(
        width,
        int(parameters["original_max_position_embeddings"]),
        base,
        float(parameters.get("beta_fast") or BETA_FAST),
        float(parameters.get("beta_slow") or BETA_SLOW),
    )
    kept = ramp(low, high, width // 2)
    stretched = 1.0 / (factor * base**exponents)
    return stretched * (1 - kept) + plain * kept, _attention_factor(parameters, factor)


def _attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """YaRN's growth of the scores with the context, unless the config sets its own."""
    stated = parameters.get("attention_factor")
    if stated is not None:
        return float(stated)
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


class RotaryTables(torch.nn.Module):
    """cos and sin of the angles at some positions, for one kind of layer."""

    def __init__(self, width: int, parameters: Mapping[str, Any]) -> None:
        super().__init__()
        with torch.device("cpu"):
            frequencies, self.factor = inverse_frequencies(width, parameters)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions i64[B, T] -> cos, sin f32[B, T, width / 2]."""
        angles = positions.unsqueeze(-1).to(torch.float32) * self.frequencies
        return angles.cos() * self.factor, angles.sin() * self.factor
