"""PyTorch through transformers: eager, or with `compile` as argument torch.compile, frozen."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from common import serve, token_ids

# Sizes of a fixed cache are multiples of this.
CACHE_STEP = 64
DTYPES = {"f32": torch.float32, "f16": torch.float16}


class Eager:
    """Eager mode, as `AutoModelForCausalLM` gives it, with its growing cache."""

    def version(self) -> str:
        return f"PyTorch {torch.__version__}, transformers {transformers.__version__}"

    def convert(self, source: str, precision: str, target: str) -> dict[str, Any]:
        """The dtype is chosen when it is loaded."""
        return {"path": source, "load": {"dtype": precision}}

    def load(self, path: str, threads: int, dtype: str) -> dict[str, Any]:
        torch.set_num_threads(threads)
        model_class = transformers.AutoModelForCausalLM
        self.model = model_class.from_pretrained(path, dtype=DTYPES[dtype]).eval()
        self.model.requires_grad_(False)
        self.ids = torch.tensor([token_ids(self.model.config.vocab_size)])
        return {}

    def _cache(self, length: int) -> Any:
        """An empty cache for `length` tokens."""
        return transformers.DynamicCache(config=self.model.config)

    def _step(self) -> Any:
        """The forward function that is timed."""
        return self.model.forward

    def _feed(self, step: Any, start: int, end: int, cache: Any) -> torch.Tensor:
        found = step(
            self.ids[:, start:end],
            position_ids=torch.arange(start, end)[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return found.logits

    def _filled(self, depth: int, tokens: int) -> Any:
        """A cache that holds `depth` tokens, with room for `tokens` more."""
        cache = self._cache(depth + tokens)
        if depth:
            self._feed(self.model.forward, 0, depth, cache)
        return cache

    @torch.inference_mode()
    def prefill(self, tokens: int, depth: int, threads: int) -> dict[str, float]:
        cache, step = self._filled(depth, tokens), self._step()
        start = time.perf_counter()
        int(self._feed(step, depth, depth + tokens, cache)[0, -1].argmax())
        return {"seconds": time.perf_counter() - start}

    @torch.inference_mode()
    def decode(self, tokens: int, depth: int, threads: int) -> dict[str, float]:
        cache, step = self._filled(depth, tokens), self._step()
        start = time.perf_counter()
        for at in range(depth, depth + tokens):
            int(self._feed(step, at, at + 1, cache)[0, -1].argmax())
        return {"seconds": time.perf_counter() - start}


class Compiled(Eager):
    """torch.compile, max-autotune, weights frozen into the graph, a cache of fixed size.

    What is held before a test is fed by the eager model, so that only the shapes that are timed are
    compiled.
    """

    def load(self, path: str, threads: int, dtype: str) -> dict[str, Any]:
        import torch._inductor.config as inductor

        inductor.freezing = True
        super().load(path, threads, dtype)
        self.compiled = torch.compile(
            self.model.forward, mode="max-autotune-no-cudagraphs", dynamic=False
        )
        self.caches: dict[int, Any] = {}
        return {}

    def _cache(self, length: int) -> Any:
        """Of the least size: attention goes over all of it."""
        size = -(-length // CACHE_STEP) * CACHE_STEP
        if size not in self.caches:
            config = self.model.config
            self.caches[size] = transformers.StaticCache(config=config, max_cache_len=size)
        self.caches[size].reset()
        return self.caches[size]

    def _step(self) -> Any:
        return self.compiled


if __name__ == "__main__":
    serve(Compiled() if sys.argv[1:] == ["compile"] else Eager())
