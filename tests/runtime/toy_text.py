"""The toy with a byte-level tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from . import tiny_tokenizers as tiny
from . import toy

VOCAB = 300
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_model(folder: Path, bias: np.ndarray | None = None, **options: Any) -> Path:
    """An artifact of the toy with a byte-level tokenizer and `TEMPLATE`."""

    def write_tokenizer(into: Path) -> None:
        config = {
            "bos_token": "<|bos|>", "eos_token": "<|end|>", "chat_template": TEMPLATE,
        }  # fmt: skip
        tiny.write(into, tiny.byte_level(), tokenizer_config=config)

    bias = favouring() if bias is None else bias
    options = {"write_tokenizer": write_tokenizer, **options}
    return toy.write_toy(folder, vocab=VOCAB, bias=bias, **options)


def favouring(**weights: float) -> np.ndarray:
    """A bias towards single bytes, and away from the tokens that do something special."""
    bias = np.zeros(VOCAB, np.float32)
    bias[[toy.NAN, toy.SLOW, toy.STRAY]] = -1e6
    for char, weight in weights.items():
        bias[ord(char)] = weight
    return bias
