"""Compiled tiny models and checkpoint folders for the behaviour tests, and ways to run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.runtime.model import Model
from bessemer.runtime.session import Session
from tests.runtime import tiny_tokenizers
from tests.tiny_models import tiny

# The byte-level toy tokenizer has 268 tokens; a model's table is padded beyond it, as real ones.
TEXT_VOCAB = 288
BOS, EOS = "<|bos|>", "<|end|>"
BARRED_EOS = "<｜end▁of▁sentence｜>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

_folder = tempfile.TemporaryDirectory(prefix="bessemer-behaviours-")


def build(
    source: Any,
    *,
    weights: str = "f32",
    kv: str = "f32",
    context: int = 64,
    chunk: int = 16,
    threads: int = 2,
    **options: Any,
) -> Model:
    """Compile `source` into a folder of its own and load it."""
    folder = Path(tempfile.mkdtemp(dir=_folder.name)) / "model"
    choices = CompileOptions(weights, kv, context, chunk=chunk, **options)
    return Model.load(compile_model(source, choices, folder), threads=threads)


def causal_lm(model_type: str, **over: Any) -> PreTrainedModel:
    """A tiny random transformers model."""
    return tiny(model_type, **over)[1]


def stepwise(session: Session, ids: Sequence[int], prefilled: int) -> np.ndarray:
    """Logits of every token, float32[len(ids), vocab]: a prefill, then one decode a token."""
    rows = [session.prefill(ids[:prefilled], all_logits=True)]
    rows += [session.decode(token)[None] for token in ids[prefilled:]]
    return np.concatenate(rows)


def text_model(model_type: str = "llama", **over: Any) -> PreTrainedModel:
    """A tiny model whose vocabulary has room for the toy tokenizer."""
    return causal_lm(model_type, **{"vocab_size": TEXT_VOCAB, "num_hidden_layers": 2, **over})


def save_folder(
    folder: Path,
    model: PreTrainedModel,
    *,
    tokenizer: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    shard: str = "5GB",
) -> Path:
    """A checkpoint as users have it: `save_pretrained`, and the byte-level toy tokenizer.

    tokenizer: replaces entries of tokenizer_config.json.  generation: of generation_config.json.
    """
    model.save_pretrained(folder, max_shard_size=shard)
    backend = tiny_tokenizers.byte_level()
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE, **(tokenizer or {})}
    ids = {
        "bos_token_id": backend.token_to_id(BOS),
        "eos_token_id": backend.token_to_id(EOS),
        **(generation or {}),
    }
    tiny_tokenizers.write(folder, backend, tokenizer_config=config, generation_config=ids)
    path = folder / "config.json"
    model_config = {**json.loads(path.read_text()), **ids, "eos_token_id": ids["eos_token_id"]}
    path.write_text(json.dumps(model_config))
    return folder


def scripted(
    model: PreTrainedModel, otherwise: Sequence[int], then: dict[int, Sequence[int]] | None = None
) -> PreTrainedModel:
    """Make a model with a head of its own answer to each token of `then` as that says, and to any
    other token by `otherwise`: the token with the highest logit, the next, and so on.

    Layers add nothing, so the last token alone decides. At most as many answers as channels.
    """
    answers = {token: tuple(ranking) for token, ranking in (then or {}).items()}
    rankings = [tuple(otherwise), *sorted(set(answers.values()) - {tuple(otherwise)})]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        table, head = model.model.embed_tokens.weight, model.lm_head.weight
        table.zero_()
        head.zero_()
        table[:, 0] = 1.0
        for token, ranking in answers.items():
            table[token] = 0.0
            table[token, rankings.index(ranking)] = 1.0
        for channel, ranking in enumerate(rankings):
            for place, token in enumerate(ranking):
                head[token, channel] = len(ranking) - place
    return model


def bessemer(
    *arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess:
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "bessemer", *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300, **options
    )
