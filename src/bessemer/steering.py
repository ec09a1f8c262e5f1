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
        """Raises UsageError unless it fits a model, in numbers that are finite."""
        if self.directions.shape != (layers, hidden):
            raise UsageError(
                f"steering directions of shape {list(self.directions.shape)}: the model has "
                f"{layers} layers of width {hidden}"
            )
        if not np.isfinite(self.directions).all() or not np.isfinite(self.scales).all():
            raise UsageError("steering directions and scales must be finite numbers")


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
