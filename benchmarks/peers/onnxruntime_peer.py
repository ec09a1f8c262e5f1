"""ONNX Runtime GenAI, its model made by its own builder."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onnxruntime_genai as genai
from common import CONTEXT, serve, token_ids

FORMATS = {"f32": "fp32", "q8_0": "int8"}


class OnnxRuntime:
    """A generator for each test: its cache can't be kept between two."""

    def version(self) -> str:
        return f"ONNX Runtime GenAI {genai.__version__}"

    def convert(self, source: str, precision: str, target: str) -> dict[str, Any]:
        if precision not in FORMATS:
            raise ValueError(f"no {precision} on the CPU")
        if not (Path(target) / "genai_config.json").exists():
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source]
            command += [
                "-o",
                target,
                "-p",
                FORMATS[precision],
                "-e",
                "cpu",
                "-c",
                f"{target}.cache",
            ]
            subprocess.run(command, check=True, stdout=sys.stderr)
        return {"path": target, "load": {}}

    def load(self, path: str, threads: int) -> dict[str, Any]:
        config = genai.Config(path)
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self.model = genai.Model(config)
        described = json.loads((Path(path) / "genai_config.json").read_text(encoding="utf-8"))
        self.ids = token_ids(described["model"]["vocab_size"])
        return {}

    def _generator(self) -> Any:
        options = genai.GeneratorParams(self.model)
        options.set_search_options(max_length=CONTEXT, min_length=CONTEXT, do_sample=False)
        return genai.Generator(self.model, options)

    def prefill(self, tokens: int, depth: int, threads: int) -> dict[str, float]:
        generator = self._generator()
        if depth:
            generator.append_tokens(self.ids[:depth])
        start = time.perf_counter()
        generator.append_tokens(self.ids[depth : depth + tokens])
        generator.generate_next_token()
        return {"seconds": time.perf_counter() - start}

    def decode(self, tokens: int, depth: int, threads: int) -> dict[str, float]:
        generator = self._generator()
        generator.append_tokens(self.ids[:depth])
        generator.generate_next_token()
        start = time.perf_counter()
        for _ in range(tokens):
            generator.generate_next_token()
        return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    serve(OnnxRuntime())
