"""CTranslate2, its model made by its own converter."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import ctranslate2
from common import WholeAnswers, serve, token_ids

# "int8" keeps activations in int8 as well.
FORMATS = {"f32": "float32", "q8_0": "int8"}


class CTranslate2(WholeAnswers):
    """A generator on token strings; single tokens are timed by its callback."""

    def version(self) -> str:
        return f"CTranslate2 {ctranslate2.__version__}"

    def convert(self, source: str, precision: str, target: str) -> dict[str, Any]:
        from ctranslate2.converters import TransformersConverter

        if precision not in FORMATS:
            raise ValueError(f"no {precision} on the CPU")
        if not (Path(target) / "model.bin").exists():
            TransformersConverter(source).convert(target, quantization=FORMATS[precision])
        return {"path": target, "load": {"compute": FORMATS[precision]}}

    def load(self, path: str, threads: int, compute: str) -> dict[str, Any]:
        self.generator = ctranslate2.Generator(
            path, device="cpu", compute_type=compute, inter_threads=1, intra_threads=threads
        )
        words = json.loads((Path(path) / "vocabulary.json").read_text(encoding="utf-8"))
        self.words = [words[i] for i in token_ids(len(words))]
        return {}

    def _generate(self, prompt: int, tokens: int) -> list[float]:
        """When each new token was there."""
        times: list[float] = []
        self.generator.generate_batch(
            [self.words[:prompt]],
            max_length=tokens,
            min_length=tokens,
            include_prompt_in_result=False,
            callback=lambda step: times.append(time.perf_counter()),
        )
        return times


if __name__ == "__main__":
    serve(CTranslate2())
