"""The measuring process of a compiled model: `python -m bessemer.bench.worker`, see `protocol`.

It imports what running a model needs and nothing else, so its memory is that of a program that
runs one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.artifact.reader import open_artifact
from bessemer.artifact.work import ProfileLayout, read_work
from bessemer.bench.memory import process_memory
from bessemer.bench.protocol import serve
from bessemer.errors import UsageError
from bessemer.runtime.engine import Engine
from bessemer.runtime.session import Session

SEED = 0


class MeasuredSession(Session):
    """A session whose profile can be read."""

    def profile_tables(self, layout: ProfileLayout, threads: int) -> list[npt.NDArray[np.int64]]:
        """The threads' profiles, int64[words] each, in the session's own memory."""
        scratch = self._engine.manifest.scratch
        tables = []
        for thread in range(threads):
            at = scratch.shared_bytes + thread * scratch.thread_bytes + layout.offset
            tables.append(self._scratch[at : at + 8 * layout.words].view(np.int64))
        return tables


class Bench:
    """The commands. One set of weights in memory, a pool and a session for each thread count."""

    def __init__(self) -> None:
        self._sessions: dict[int, MeasuredSession] = {}
        self._ids = np.zeros(0, np.int64)
        self._profile: ProfileLayout | None = None

    def load(self, folder: str, threads: Sequence[int], profile: bool = False) -> dict[str, Any]:
        """Load the artifact for each of the thread counts. Gives the seconds that the first took,
        and the thread counts that the system allowed.
        """
        start = time.perf_counter()
        artifact = open_artifact(folder)
        engine = Engine.load(artifact, threads[0])
        self._sessions[threads[0]] = MeasuredSession(engine)
        seconds = time.perf_counter() - start
        for count in threads[1:]:
            other = replace(engine, pool=engine.library.create_pool(count))
            self._sessions[count] = MeasuredSession(other)
        manifest = artifact.manifest
        self._ids = np.random.default_rng(SEED).integers(
            0, manifest.vocab_size, manifest.context_length
        )
        self._profile = read_work(Path(folder)).profile if profile else None
        if profile and self._profile is None:
            raise UsageError(f"{folder} was not compiled to measure itself")
        return {"load_s": seconds, "threads": [s._engine.threads for s in self._sessions.values()]}

    def prefill(self, tokens: int, depth: int, threads: int) -> dict[str, Any]:
        """Seconds of feeding `tokens` after `depth` others, up to the choice of the next one."""
        session = self._at(threads, depth)
        new = self._ids[depth : depth + tokens]

        def feed() -> None:
            int(np.argmax(session.prefill(new)))

        return self._timed(feed, session, threads)

    def decode(self, tokens: int, depth: int, threads: int) -> dict[str, Any]:
        """Seconds of feeding `tokens` one by one after `depth` others, each up to a choice."""
        session = self._at(threads, depth)
        new = [int(i) for i in self._ids[depth : depth + tokens]]

        def feed() -> None:
            for token in new:
                int(np.argmax(session.decode(token)))

        return self._timed(feed, session, threads)

    def memory(self) -> dict[str, Any]:
        """Memory of the process; `held`: tokens that all sessions hold together."""
        held = sum(session.position for session in self._sessions.values())
        return {**process_memory(), "held": held}

    def _at(self, threads: int, depth: int) -> MeasuredSession:
        """The session with exactly `depth` tokens, all of them in the cache."""
        session = self._sessions[threads]
        if session.position > depth:
            # One further, and fed again: a ring that has lost kept rows is filled here, untimed.
            session.rewind(max(0, depth - 1))
        if session.position < depth:
            session.prefill(self._ids[session.position : depth])
        return session

    def _timed(
        self, feed: Callable[[], None], session: MeasuredSession, threads: int
    ) -> dict[str, Any]:
        """Seconds of `feed`, and what the threads' profiles grew by meanwhile, if they are kept."""
        layout = self._profile
        tables = session.profile_tables(layout, threads) if layout is not None else []
        for table in tables:
            table[1:] = 0
            table[0] = time.clock_gettime_ns(time.CLOCK_MONOTONIC)  # as native/profile.c has it
        start = time.perf_counter()
        feed()
        seconds = time.perf_counter() - start
        if layout is None:
            return {"seconds": seconds}
        return {"seconds": seconds, "profile": [table.tolist() for table in tables]}


def main() -> None:
    """Serve commands until the input ends."""
    bench = Bench()
    serve(
        {
            "load": bench.load,
            "prefill": bench.prefill,
            "decode": bench.decode,
            "memory": bench.memory,
        }
    )


if __name__ == "__main__":
    main()
