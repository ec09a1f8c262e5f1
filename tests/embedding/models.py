"""Tiny compiled models for the tests of embedding: each is compiled once in a process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from tests.tiny_models import tiny

CONTEXT, CHUNK = 80, 16

_folder = tempfile.TemporaryDirectory(prefix="bessemer-embedding-")


def models_folder() -> Path:
    return Path(_folder.name)


@functools.cache
def compiled(model_type: str, name: str, prefix: str = "") -> Path:
    """The artifact of a tiny model in `models_folder() / name`."""
    _, model = tiny(model_type, num_hidden_layers=2)
    options = CompileOptions("f32", "f32", CONTEXT, chunk=CHUNK, prefix=prefix)
    return compile_model(model, options, models_folder() / name)


def plain() -> Path:
    """With sliding windows, so that rewinds may have to feed tokens again."""
    return compiled("mistral", "plain")


def first() -> Path:
    return compiled("mistral", "first", "first_")


def second() -> Path:
    return compiled("qwen2", "second", "second_")
