"""Compiled tiny models for end-to-end tests, and the PyTorch numbers to hold them against."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.runtime.model import Model
from tests.tiny_models import VOCAB, tiny

# Relative L2 error of logits with f32 weights and an f32 KV cache; typical is 1e-6 (DESIGN, Proof).
F32_ERROR = 1e-4
CONTEXT = 80
# Smaller than the prompts, so that every prefill below runs in several chunks.
CHUNK = 16

_folder = tempfile.TemporaryDirectory(prefix="bessemer-e2e-")


@cache
def tiny_pair(model_type: str, **over: Any) -> tuple[Any, PreTrainedModel]:
    return tiny(model_type, **over)


@cache
def compiled(
    model_type: str,
    *,
    weights: str = "f32",
    kv: str = "f32",
    schedule: str = "kernels",
    context: int = CONTEXT,
    chunk: int = CHUNK,
) -> Path:
    """Folder of the compiled tiny model; each combination is compiled once per process."""
    _, model = tiny_pair(model_type)
    options = CompileOptions(weights, kv, context, chunk=chunk, schedule=schedule)
    name = f"{model_type}-{weights}-{kv}-{schedule}-{context}-{chunk}"
    return compile_model(model, options, Path(_folder.name) / name)


def load(model_type: str, threads: int = 2, **options: Any) -> Model:
    return Model.load(compiled(model_type, **options), threads=threads)


def token_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def reference(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """PyTorch's logits of every token in one cold forward, float32[len(ids), vocab]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().numpy()


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 error of the worst row."""
    got, want = np.atleast_2d(got), np.atleast_2d(want)
    return float((np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max())
