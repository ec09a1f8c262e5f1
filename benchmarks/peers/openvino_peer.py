"""OpenVINO GenAI, its model exported by optimum-intel."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from common import WholeAnswers, read_config, serve, token_ids

FORMATS = {"f32": "fp32", "f16": "fp16", "q8_0": "int8"}


class OpenVino(WholeAnswers):
    """LLMPipeline on token ids; single tokens are timed by its streaming callback."""

    def version(self) -> str:
        return f"OpenVINO {ov.__version__}, GenAI {genai.__version__}"

    def convert(self, source: str, precision: str, target: str) -> dict[str, Any]:
        if not (Path(target) / "openvino_model.bin").exists():
            command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
            command += ["--model", source, "--task", "text-generation-with-past"]
            command += ["--weight-format", FORMATS[precision], target]
            subprocess.run(command, check=True, stdout=sys.stderr)
        return {"path": target, "load": {}}

    def load(self, path: str, threads: int) -> dict[str, Any]:
        properties = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1}
        self.pipe = genai.LLMPipeline(path, "CPU", **properties)
        self.ids = token_ids(read_config(path)["vocab_size"])
        self.calls = 0
        return {}

    def _generate(self, prompt: int, tokens: int) -> list[float]:
        """When each new token was there."""
        times: list[float] = []

        def seen(text: Any) -> Any:
            times.append(time.perf_counter())
            return genai.StreamingStatus.RUNNING

        class Ticks(genai.StreamerBase):
            def write(self, token: Any) -> Any:
                return seen(token)

            def end(self) -> None:
                pass

        options = genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos, options.do_sample = tokens, True, False
        options.apply_chat_template = False
        # The pipeline keeps the keys and values of prompts that it has seen, and reuses those of a
        # common beginning: another first token each time makes it do the work.
        self.calls += 1
        ids = ov.Tensor(np.array([[self.calls, *self.ids[1:prompt]]], np.int64))
        self.pipe.generate(ids, options, Ticks())
        return times


if __name__ == "__main__":
    serve(OpenVino())
