"""What the measuring processes of all engines share.

A peer is a script that answers the commands of `bessemer.bench.protocol`:

    version()                            what is installed; the process ends where nothing is
    convert(source, precision, target)   a Hugging Face folder to the engine's own format
    load(path, threads)                  the model, resident from then on
    prefill(tokens, depth, threads)      {"seconds"} of a prompt, up to the next token's logits
    decode(tokens, depth, threads)       {"seconds"} of tokens one by one, after `depth` others

It runs in the peer's own environment, which doesn't have Bessemer: the protocol is loaded by path.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

SEED = 0
# Tokens that a session can hold: what the deepest test needs, for all engines alike.
CONTEXT = 4096

_PROTOCOL = Path(__file__).resolve().parents[2] / "src" / "bessemer" / "bench" / "protocol.py"


def protocol() -> Any:
    """The module `bessemer.bench.protocol`."""
    spec = importlib.util.spec_from_file_location("protocol", _PROTOCOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(peer: Any) -> None:
    """Answer commands with the methods of `peer`."""
    names = ("version", "convert", "load", "prefill", "decode")
    protocol().serve({name: getattr(peer, name) for name in names})


class WholeAnswers:
    """Measuring an engine that only gives whole answers: by when each token was there."""

    def _generate(self, prompt: int, tokens: int) -> list[float]:
        """Clock times at which each of `tokens` new tokens was there, after a prompt."""
        raise NotImplementedError

    def prefill(self, tokens: int, depth: int, threads: int) -> dict[str, float]:
        if depth:
            raise ValueError("prompts are measured from the start")
        start = time.perf_counter()
        return {"seconds": self._generate(tokens, 1)[0] - start}

    def decode(self, tokens: int, depth: int, threads: int) -> dict[str, float]:
        times = self._generate(depth, tokens + 1)
        return {"seconds": times[tokens] - times[0]}


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder."""
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def token_ids(vocab: int, count: int = CONTEXT) -> list[int]:
    """The same random ids for every engine."""
    return [int(i) for i in np.random.default_rng(SEED).integers(0, vocab, count)]
