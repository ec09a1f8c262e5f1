"""The architectures that are tested against transformers, and those that can't be compiled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from bessemer.arguments import shown
from bessemer.errors import UnsupportedError, UsageError
from bessemer.importer.config_numbers import check_numbers, refuse

_BOTH = "export and dynamo"

# model_type -> which capture ways work
SUPPORTED: dict[str, str] = dict.fromkeys(
    (
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v4",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    ),
    _BOTH,
)

_RECURRENT = "its layers keep a recurrent or convolution state, which is not captured yet"
_ENCODER = "it is not a causal language model"
_IMAGES = "it takes images or sound besides tokens"

# model_type -> why not
UNSUPPORTED: dict[str, str] = {
    **dict.fromkeys(("bloom", "mpt"), "its attention adds ALiBi biases to the scores"),
    **dict.fromkeys(
        (
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
            "jamba",
            "lfm2",
            "lfm2_moe",
            "mamba",
            "mamba2",
            "minimax",
            "nemotron_h",
            "qwen3_next",
            "recurrent_gemma",
            "rwkv",
            "zamba",
            "zamba2",
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(("bert", "distilbert", "roberta", "t5", "bart", "modernbert"), _ENCODER),
    **dict.fromkeys(
        (
            "gemma3",
            "gemma3n",
            "gemma4",
            "idefics3",
            "llama4",
            "llava",
            "mistral3",
            "mllama",
            "paligemma",
            "qwen2_5_vl",
            "qwen2_vl",
            "qwen3_vl",
            "smolvlm",
        ),
        _IMAGES,
    ),
    "gemma3n_text": "its later layers share the keys and values of earlier ones",
}


def check_config(config: dict[str, Any]) -> None:
    """Raises UnsupportedError for a config that is known not to compile, with the reason, and
    CheckpointError for one whose numbers can't be right.
    """
    kind = config.get("model_type")
    if not kind:
        raise UnsupportedError("config.json has no model_type")
    refuse([] if isinstance(kind, str) else [f"model_type is {shown(kind)}, and must be a text"])
    if kind in UNSUPPORTED:
        raise UnsupportedError(
            f"model_type {kind!r} can't be compiled: {UNSUPPORTED[kind]}. "
            f"Tested architectures: {', '.join(sorted(SUPPORTED))}"
        )
    check_numbers(config)


def check_stated_context(config: Mapping[str, Any], context: int) -> None:
    """Raises UsageError when a session of `context` tokens is beyond anything that a config.json
    states, stretched by its rotary scaling or not. What is left is known after the import: each
    architecture has defaults and rules of its own.
    """
    parts = [part for part in (config.get("text_config"), config) if isinstance(part, Mapping)]
    for part in parts:
        limit = part.get("max_position_embeddings")
        if isinstance(limit, int):
            most = int(limit * max([1.0, *_factors(part)]))
            if context > most:
                raise UsageError(
                    f"--context {context}: the model was made for at most {most} tokens"
                )
            return


def _factors(config: Mapping[str, Any]) -> Iterator[float]:
    """Every factor by which a config stretches rotary positions."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        entries = [found, *found.values()] if isinstance(found, Mapping) else []
        for entry in entries:
            factor = entry.get("factor") if isinstance(entry, Mapping) else None
            if isinstance(factor, (int, float)) and math.isfinite(factor):
                yield float(factor)
