"""llama.cpp through llama-cpp-python, by its C interface."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp as llama
from common import CONTEXT, serve, token_ids
from gguf_writer import write_gguf

# Rows of a forward call: llama.cpp's default.
BATCH = 512

_quiet = llama.llama_log_callback(lambda level, text, data: None)


class LlamaCpp:
    """One context; its cache is cut back to the depth of a test."""

    def version(self) -> str:
        llama.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama.llama_backend_init()
        features = llama.llama_print_system_info().decode()
        return f"llama-cpp-python {llama.__version__} ({features.strip()})"

    def convert(self, source: str, precision: str, target: str) -> dict[str, Any]:
        path = Path(target + ".gguf")  # with_suffix would cut a dotted name
        if not path.exists():
            write_gguf(Path(source), precision, path)
        return {"path": str(path), "load": {}}

    def load(self, path: str, threads: int) -> dict[str, Any]:
        self.model = llama.llama_model_load_from_file(
            path.encode(), llama.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp can't load {path}")
        options = llama.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT, BATCH, BATCH
        options.n_threads = options.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, options)
        self.memory = llama.llama_get_memory(self.context)
        vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        ids = token_ids(vocab)
        self.vocab, self.ids = vocab, (llama.llama_token * len(ids))(*ids)
        self.held = 0
        return {}

    def _feed(self, start: int, end: int) -> None:
        """In batches; waits for the result and reads one logit."""
        for at in range(start, end, BATCH):
            count = min(BATCH, end - at)
            first = ctypes.cast(
                ctypes.addressof(self.ids) + at * ctypes.sizeof(llama.llama_token),
                ctypes.POINTER(llama.llama_token),
            )
            status = llama.llama_decode(self.context, llama.llama_batch_get_one(first, count))
            if status != 0:
                raise RuntimeError(f"llama_decode: {status}")
        llama.llama_synchronize(self.context)
        self.held = end

    def _at(self, depth: int) -> None:
        if self.held > depth:
            llama.llama_memory_seq_rm(self.memory, 0, depth, -1)
            self.held = depth
        if self.held < depth:
            self._feed(self.held, depth)

    def prefill(self, tokens: int, depth: int, threads: int) -> dict[str, float]:
        self._at(depth)
        start = time.perf_counter()
        self._feed(depth, depth + tokens)
        return {"seconds": time.perf_counter() - start}

    def decode(self, tokens: int, depth: int, threads: int) -> dict[str, float]:
        self._at(depth)
        start = time.perf_counter()
        for at in range(depth, depth + tokens):
            self._feed(at, at + 1)
        return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    serve(LlamaCpp())
