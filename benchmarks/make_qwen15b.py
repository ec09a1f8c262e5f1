"""Makes a model folder of exactly the shape of DeepSeek-R1-Distill-Qwen-1.5B, with random weights.

    python benchmarks/make_qwen15b.py FOLDER [--seed N]

The folder holds 3.6 GB of float16 in safetensors shards, written a few megabytes at a time, the
model's configuration, and a small byte-level BPE tokenizer, so that it can be compiled and run. Its
answers mean nothing; its speed and memory are those of the real model.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SHARD_BYTES = 1 << 30
BLOCK_ELEMENTS = 1 << 22
"""Values generated at a time: 16 MiB of float32."""

WEIGHT_SPREAD = 0.02
BIAS_SPREAD = 0.1
NORM_SPREAD = 0.1

PARAMETERS = 1_777_088_000
ROTARY_FREQUENCIES = 64
"""head_dim / 2: a buffer, which some tools store and count with the parameters."""

SPECIAL_TOKENS = [
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
]
EOS, BOS = SPECIAL_TOKENS[:2]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message['content'] + eos_token }}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
SAMPLE_TEXT = [
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "A compiler turns a program into another program that does the same, only faster.",
    "def add(first, second):\n    return first + second\n",
    "Let me think about this step by step: first the question, then the answer.",
    "Die Hauptstadt von Österreich ist Wien; 日本の首都は東京です。 Привет, мир!",
    "In 2024 there were 366 days, 8784 hours and 31622400 seconds.",
]
"""What the tokenizer's few merges are learned from."""


@dataclass(frozen=True)
class Shape:
    """The dimensions of a Qwen2 model with an untied head."""

    layers: int = 28
    hidden: int = 1536
    heads: int = 12
    kv_heads: int = 2
    intermediate: int = 8960
    vocab: int = 151936
    context: int = 131072
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads

    def config(self) -> dict[str, Any]:
        """config.json, as the model's own."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "attention_dropout": 0.0,
            "bos_token_id": SPECIAL_TOKENS.index(BOS),
            "eos_token_id": SPECIAL_TOKENS.index(EOS),
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "initializer_range": WEIGHT_SPREAD,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.context,
            "max_window_layers": 21,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "use_cache": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": self.vocab,
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape."""
        kv = self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (self.vocab, self.hidden),
        }
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name, rows in (("q_proj", self.hidden), ("k_proj", kv), ("v_proj", kv)):
                shapes[f"{prefix}self_attn.{name}.weight"] = (rows, self.hidden)
                shapes[f"{prefix}self_attn.{name}.bias"] = (rows,)
            shapes[f"{prefix}self_attn.o_proj.weight"] = (self.hidden, self.hidden)
            for name in ("gate_proj", "up_proj"):
                shapes[f"{prefix}mlp.{name}.weight"] = (self.intermediate, self.hidden)
            shapes[f"{prefix}mlp.down_proj.weight"] = (self.hidden, self.intermediate)
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{name}.weight"] = (self.hidden,)
        return shapes


def random_blocks(name: str, shape: tuple[int, ...], seed: int) -> Iterator[bytes]:
    """A parameter's float16 bytes, block by block; the same for a name and a seed."""
    rng = np.random.default_rng([seed, *name.encode()])
    left = math.prod(shape)
    if name.endswith("norm.weight"):
        spread, offset = NORM_SPREAD, 1.0
    else:
        spread, offset = (BIAS_SPREAD if name.endswith(".bias") else WEIGHT_SPREAD), 0.0
    while left:
        count = min(left, BLOCK_ELEMENTS)
        values = rng.standard_normal(count, dtype=np.float32)
        values *= np.float32(spread)
        values += np.float32(offset)
        yield values.astype(np.float16).tobytes()
        left -= count


def plan_shards(shapes: dict[str, tuple[int, ...]], limit: int) -> list[list[str]]:
    """Names by shard, in order, each shard of at most `limit` bytes where a tensor allows."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        nbytes = 2 * math.prod(shape)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def write_shard(path: Path, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    """One safetensors file with the tensors of `shapes`, in that order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for block in random_blocks(name, shape, seed):
                file.write(block)
    partial.replace(path)


def write_tokenizer(folder: Path, context: int) -> None:
    """A byte-level BPE tokenizer of a few hundred tokens, split as Qwen2's is."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from tokenizers.trainers import BpeTrainer

    from bessemer.importer.checkpoint.pretokenizers import PRE_TOKENIZERS

    (pattern,) = PRE_TOKENIZERS["qwen2"].patterns
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE_TEXT, trainer)
    tokenizer.post_processor = TemplateProcessing(
        single=[BOS, "$A"],
        pair=[BOS, "$A", BOS, "$B"],
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes `value` readably."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make(folder: Path, shape: Shape, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> int:
    """Writes the whole model; returns its parameter count. The index is written last."""
    shapes = shape.tensors()
    count = sum(math.prod(dims) for dims in shapes.values())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 2 * count:
        raise SystemExit(f"{folder}: {2 * count:,} bytes needed, {free:,} free")
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    shards = plan_shards(shapes, shard_bytes)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards, start=1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        print(f"{file}: {len(names)} tensors", file=sys.stderr, flush=True)
        write_shard(folder / file, {name: shapes[name] for name in names}, seed)
        weight_map |= dict.fromkeys(names, file)
    write_json(folder / "config.json", shape.config())
    ends = {key: shape.config()[key] for key in ("bos_token_id", "eos_token_id")}
    write_json(folder / "generation_config.json", ends)
    write_tokenizer(folder, shape.context)
    write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": 2 * count}, "weight_map": weight_map},
    )
    return count


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shape = Shape()
    count = make(arguments.folder, shape, arguments.seed)
    assert count == PARAMETERS, f"{count:,} parameters instead of {PARAMETERS:,}"
    assert shape.head_dim // 2 == ROTARY_FREQUENCIES
    print(
        f"{arguments.folder}: {count:,} parameters "
        f"({count + ROTARY_FREQUENCIES:,} with the rotary frequencies)"
    )


if __name__ == "__main__":
    main()
