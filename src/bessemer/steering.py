"""Directional steering: a session moves the output of sublayers along a direction of each layer.

With direction d and scale s, the output y of a layer's attention (or feed-forward) module becomes
y - s * (y . d) * d. With a d of length 1, s = 1 takes the direction out, s < 0 adds to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bessemer.errors import UsageError

# The states of a graph that can be steered: directions [layers, hidden], and scales [2], of which
# the first is for attention and the second for feed-forward modules.
DIRECTIONS = "steering"
SCALES = "steering_scales"
ATTENTION_SITE, FFN_SITE = 0, 1
SITES = 2
# How far an output may be moved, in its own size. Larger ones say nothing of a model: a norm makes
# the sum of outputs small again, until their squares are beyond f32 and all logits are equal.
MOST_SCALE = 1e4
# Of the length of a direction in float32 that is meant to be 1.
ROUNDING = 1e-4


@dataclass(frozen=True, eq=False)
class Steering:
    """directions: float32 [layers, hidden].  attention, ffn: the scales."""

    directions: npt.NDArray[np.float32]
    attention: float = 0.0
    ffn: float = 0.0

    @property
    def scales(self) -> npt.NDArray[np.float32]:
        return np.array([self.attention, self.ffn], np.float32)

    def check(self, layers: int, hidden: int) -> None:
        """Raises UsageError unless it fits a model, in numbers that are finite and move outputs by
        no more than `MOST_SCALE` times their size.
        """
        if self.directions.shape != (layers, hidden):
            raise UsageError(
                f"steering directions of shape {list(self.directions.shape)}: the model has "
                f"{layers} layers of width {hidden}"
            )
        if not np.isfinite(self.directions).all():
            raise UsageError("steering directions must be finite numbers")
        check_scales(self.attention, self.ffn)
        squares = np.square(self.directions, dtype=np.float64).sum(-1)
        layer, scale = int(squares.argmax()), max(abs(self.attention), abs(self.ffn))
        if scale * squares[layer] > MOST_SCALE * (1 + ROUNDING):
            raise UsageError(
                f"steering by {scale:g} along layer {layer}'s direction, of length "
                f"{squares[layer] ** 0.5:.4g}, moves outputs by {scale * squares[layer]:.4g} times "
                f"their size (the scale times the length squared); at most {MOST_SCALE:g} is "
                "allowed: directions are meant to have length 1, and scales to be near 1"
            )


def check_scales(*scales: float) -> None:
    """Raises UsageError unless scales are finite and no larger than steering can use."""
    for scale in scales:
        if not abs(scale) <= MOST_SCALE:
            raise UsageError(
                f"a steering scale of {scale:g}: scales are finite numbers from {-MOST_SCALE:g} to "
                f"{MOST_SCALE:g}; 1 takes a direction of length 1 out"
            )


def check_readable(path: Path) -> None:
    """UsageError unless a file of directions can be opened: known before a model is compiled."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"--steering {path}: it can't be read: {error.strerror or error}")


def read_directions(path: Path, layers: int, hidden: int) -> npt.NDArray[np.float32]:
    """The directions of a file: one row of `hidden` float32 (little-endian) for each layer.

    Raises UsageError when the file can't be read, or has another size.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    wanted = layers * hidden * 4
    if len(data) != wanted:
        raise UsageError(
            f"--steering {path}: {len(data)} bytes; {layers} rows of {hidden} float32, one for "
            f"each layer, are {wanted}"
        )
    return np.frombuffer(data, "<f4").astype(np.float32).reshape(layers, hidden)
