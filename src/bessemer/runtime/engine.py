"""What all sessions of a model share: the library, the thread pool and the weights."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import numpy as np
import numpy.typing as npt

from bessemer.arguments import shown
from bessemer.artifact.manifest import Manifest
from bessemer.artifact.reader import Artifact
from bessemer.errors import ArgumentError
from bessemer.runtime.cpu import MOST_THREADS, default_threads
from bessemer.runtime.library import Library, Pool
from bessemer.runtime.weights import load_weights


def check_threads(threads: int | None) -> None:
    """UsageError unless so many threads can be started; None stands for the default."""
    if threads is None:
        return
    whole = isinstance(threads, Integral) and not isinstance(threads, bool)
    if not whole or not 1 <= threads <= MOST_THREADS:
        raise ArgumentError("threads", shown(threads), f"from 1 to {MOST_THREADS}")


@dataclass(frozen=True)
class Engine:
    """A loaded artifact, ready to be called. Read-only after loading; threads may share it.

    weights: the tensors, uint8 [bytes], page-aligned.
    """

    manifest: Manifest
    library: Library
    pool: Pool
    weights: npt.NDArray[np.uint8]

    @property
    def threads(self) -> int:
        """Workers of a call, the caller included."""
        return self.pool.size

    @classmethod
    def load(
        cls, artifact: Artifact, threads: int | None = None, weights_mode: str | None = None
    ) -> Engine:
        """Load library and weights of a checked artifact and start the threads.

        threads: as many as this process may use cores when None.  weights_mode: see
        `weights.load_weights`.
        """
        check_threads(threads)
        library = Library(artifact.library, artifact.manifest)
        pool = library.create_pool(threads or default_threads())
        return cls(artifact.manifest, library, pool, load_weights(artifact, weights_mode))
