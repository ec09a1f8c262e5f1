"""The architectures that can be read from GGUF: tensor names, shapes and configuration.

GGUF files use their own names for tensors and hyperparameters. Here they are brought to those of
transformers, once, so that nothing after this knows where a checkpoint came from. What a file says
and this can't express is an error: a model that is read wrongly answers, and answers badly.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from bessemer.importer.checkpoint.files import damaged
from bessemer.importer.checkpoint.gguf_deepseek4 import DEEPSEEK4
from bessemer.importer.checkpoint.gguf_file import GGUFMetadata, GGUFTensor
from bessemer.importer.checkpoint.gguf_rope import read_rope
from bessemer.importer.checkpoint.gguf_rules import NORMS, Architecture, MappedTensor, TensorRule

UNLISTED_SHOWN = 8


ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Read into the configuration, not into parameters."""


def _linear(
    source: str, target: str, dims: tuple[str, str], bias: bool | None, heads: str | None = None
) -> tuple[TensorRule, ...]:
    """A weight and its bias: `bias` True is required, None is optional, False does not exist."""
    weight = TensorRule(f"{source}.weight", f"{target}.weight", dims, heads=heads)
    if bias is False:
        return (weight,)
    required = bias is True
    return weight, TensorRule(f"{source}.bias", f"{target}.bias", dims[:1], required, heads)


def _attention(qkv_bias: bool | None, output_bias: bool | None) -> tuple[TensorRule, ...]:
    return (
        *_linear("attn_q", "self_attn.q_proj", ("q", "hidden"), qkv_bias, "num_attention_heads"),
        *_linear("attn_k", "self_attn.k_proj", ("kv", "hidden"), qkv_bias, "num_key_value_heads"),
        *_linear("attn_v", "self_attn.v_proj", ("kv", "hidden"), qkv_bias),
        *_linear("attn_output", "self_attn.o_proj", ("hidden", "q"), output_bias),
    )


def _gated_mlp(bias: bool | None) -> tuple[TensorRule, ...]:
    return (
        *_linear("ffn_gate", "mlp.gate_proj", ("ffn", "hidden"), bias),
        *_linear("ffn_up", "mlp.up_proj", ("ffn", "hidden"), bias),
        *_linear("ffn_down", "mlp.down_proj", ("hidden", "ffn"), bias),
    )


HEAD_NORMS = (
    TensorRule("attn_q_norm.weight", "self_attn.q_norm.weight", ("head",)),
    TensorRule("attn_k_norm.weight", "self_attn.k_norm.weight", ("head",)),
)

FUSED = (
    *_linear("attn_qkv", "self_attn.qkv_proj", ("qkv", "hidden"), bias=False),
    *_linear("attn_output", "self_attn.o_proj", ("hidden", "q"), bias=False),
    *_linear("ffn_up", "mlp.gate_up_proj", ("gate_up", "hidden"), bias=False),
    *_linear("ffn_down", "mlp.down_proj", ("hidden", "ffn"), bias=False),
)


def _adjust_llama(reader: ArchitectureReader, config: dict[str, Any]) -> None:
    """Optional biases, and Mistral, which converters store as llama with a sliding window."""
    config["attention_bias"] = reader.all_or_none(
        [f"attn_{part}.bias" for part in ("q", "k", "v", "output")]
    )
    config["mlp_bias"] = reader.all_or_none([f"ffn_{part}.bias" for part in ("gate", "up", "down")])
    window = reader.metadata.integer("llama.attention.sliding_window")
    if not window:
        return
    if config["attention_bias"] or config["mlp_bias"]:
        reader.fail("has a sliding window and biases, which no supported model has together")
    del config["attention_bias"], config["mlp_bias"]
    config.update(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=window)


def _adjust_phi3(reader: ArchitectureReader, config: dict[str, Any]) -> None:
    config["sliding_window"] = reader.metadata.integer("phi3.attention.sliding_window") or None
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        reader.fail("its heads do not add up to the hidden size, which phi3 can't express")
    original = reader.metadata.integer("phi3.rope.scaling.original_context_length")
    config["original_max_position_embeddings"] = original or config["max_position_embeddings"]


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "llama",
            "llama",
            "LlamaForCausalLM",
            (*NORMS, *_attention(None, None), *_gated_mlp(None)),
            permutes=True,
            adjust=_adjust_llama,
        ),
        Architecture(
            "qwen2",
            "qwen2",
            "Qwen2ForCausalLM",
            (*NORMS, *_attention(True, False), *_gated_mlp(False)),
            config={"use_sliding_window": False, "sliding_window": None},
        ),
        Architecture(
            "qwen3",
            "qwen3",
            "Qwen3ForCausalLM",
            (*NORMS, *HEAD_NORMS, *_attention(False, False), *_gated_mlp(False)),
            config={"use_sliding_window": False, "sliding_window": None, "attention_bias": False},
        ),
        Architecture("phi3", "phi3", "Phi3ForCausalLM", (*NORMS, *FUSED), adjust=_adjust_phi3),
        DEEPSEEK4,
    )
}
"""The supported architectures by the name that GGUF files give them."""

MEANINGFUL_KEYS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.layer_norm_epsilon": (),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (1.0,),
    "expert_count": (0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
    "residual_scale": (1.0,),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_log_multiplier": (),
    "tensor_data_layout": ("Meta AI original pth",),
    "use_parallel_residual": (False,),
}
"""Keys that change what the model computes and that no architecture here has, with the values at
which they do nothing."""


class ArchitectureReader:
    """Reads one file's configuration and tensor names.

    Args:
        path: the file, for messages.
        metadata: its metadata.
        tensors: its tensors by GGUF name.
        read_factors: reads a tensor of the file as a list of floats (RoPE factors).

    Raises:
        CheckpointError: no architecture, an unsupported one, missing or contradictory metadata.
    """

    def __init__(
        self,
        path: Path,
        metadata: GGUFMetadata,
        tensors: dict[str, GGUFTensor],
        read_factors: Callable[[str], list[float]],
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self.read_factors = read_factors
        name = metadata.string("general.architecture")
        if name is None:
            self.fail("no architecture: the key general.architecture is missing")
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            self.fail(f"architecture '{name}' can't be read from GGUF; supported are {known}")
        self.architecture = ARCHITECTURES[name]

    def fail(self, what: str, tensor: str | None = None) -> NoReturn:
        """Raises CheckpointError about this file."""
        raise damaged(self.path, what, tensor)

    def positive(self, key: str) -> int:
        """The architecture's key as a number above zero, the same for all layers."""
        value = self.metadata.uniform_integer(f"{self.architecture.name}.{key}")
        if not value:
            self.fail(f"the key {self.architecture.name}.{key} is missing or zero")
        return value

    def all_or_none(self, sources: list[str]) -> bool:
        """Whether all layers have all of these tensors; a mixture is an error."""
        layers = range(self.positive("block_count"))
        wanted = [f"blk.{layer}.{source}" for layer in layers for source in sources]
        held = [name for name in wanted if name in self.tensors]
        if held and len(held) != len(wanted):
            absent = next(name for name in wanted if name not in self.tensors)
            self.fail(f"missing, though '{held[0]}' is there", absent)
        return bool(held)

    def config(self) -> dict[str, Any]:
        """The file's hyperparameters as config.json has them."""
        self._refuse_meaningful_keys()
        architecture, prefix = self.architecture, self.architecture.name
        if architecture.configure is not None:
            return architecture.configure(self)
        heads = self.positive("attention.head_count")
        hidden = self.positive("embedding_length")
        kv_heads = self.metadata.uniform_integer(f"{prefix}.attention.head_count_kv") or heads
        if heads % kv_heads:
            self.fail(f"{heads} attention heads can't share {kv_heads} key-value heads")
        head_dim = self._head_dim(hidden, heads)
        eps = self.metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon")
        if eps is None:
            self.fail(f"the key {prefix}.attention.layer_norm_rms_epsilon is missing")
        config: dict[str, Any] = {
            "architectures": [architecture.model_class],
            "model_type": architecture.model_type,
            "vocab_size": self.vocab_size(),
            "hidden_size": hidden,
            "intermediate_size": self.positive("feed_forward_length"),
            "num_hidden_layers": self.positive("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.positive("context_length"),
            "rms_norm_eps": eps,
            "tie_word_embeddings": "output.weight" not in self.tensors,
            **architecture.config,
        }
        config.update(self.token_ids())
        config["rope_parameters"] = read_rope(self, config)
        if architecture.adjust is not None:
            architecture.adjust(self, config)
        return config

    def _head_dim(self, hidden: int, heads: int) -> int:
        prefix = f"{self.architecture.name}.attention"
        head_dim = self.metadata.integer(f"{prefix}.key_length")
        if head_dim is None:
            if hidden % heads:
                self.fail(f"{hidden} channels can't be split into {heads} heads")
            head_dim = hidden // heads
        value_dim = self.metadata.integer(f"{prefix}.value_length", head_dim)
        if value_dim != head_dim or head_dim == 0 or head_dim % 2:
            self.fail(f"key and value lengths {head_dim} and {value_dim} are not supported")
        return head_dim

    def vocab_size(self) -> int:
        """Rows of the embedding, which every file has."""
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            self.fail("missing, or not a matrix", "token_embd.weight")
        return embedding.shape[0]

    def token_ids(self) -> dict[str, int | None]:
        """Entries of config.json for special tokens; None where the file has none, since
        transformers' defaults are other models' tokens."""
        keys = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        return {
            f"{name}_token_id": self.metadata.integer(f"tokenizer.ggml.{key}_token_id")
            for name, key in keys
        }

    def _refuse_meaningful_keys(self) -> None:
        for key, neutral in MEANINGFUL_KEYS.items():
            full = f"{self.architecture.name}.{key}"
            if key in self.architecture.understood or not self.metadata.has(full):
                continue
            value = self.metadata.values[full]
            if not isinstance(value, bool | int | float | str) or value not in neutral:
                self.fail(
                    f"sets {full} to {value}, which can't be read for the architecture "
                    f"'{self.architecture.name}'"
                )

    def map_tensors(self, config: dict[str, Any]) -> dict[str, MappedTensor]:
        """Every tensor under transformers' name, complete and of the right shape.

        Raises:
            CheckpointError: a tensor is missing, has another shape than the configuration gives,
                or is not known.
        """
        architecture = self.architecture
        mapped: dict[str, MappedTensor] = {}
        used: set[str] = set(ROPE_TENSORS)
        dims = architecture.dimensions(config)
        rules = [("", "", rule) for rule in architecture.global_rules] + [
            (f"blk.{layer}.", f"model.layers.{layer}.", rule)
            for layer in range(config["num_hidden_layers"])
            for rule in architecture.rules_of(config, layer)
        ]
        for source_prefix, target_prefix, rule in rules:
            names = [source_prefix + name for name in (rule.source, *rule.other_sources)]
            source = next((name for name in names if name in self.tensors), None)
            if source is None:
                if rule.required:
                    self.fail("missing; the file is incomplete", names[0])
                continue
            tensor = self.tensors[source]
            shape = tuple(dims[dim] for dim in rule.dims)
            if tensor.shape != shape:
                self.fail(
                    f"has the shape {list(tensor.shape)}, the configuration gives {list(shape)}",
                    source,
                )
            used.add(source)
            heads = config[rule.heads] if rule.heads and architecture.permutes else 0
            target = target_prefix + rule.target
            mapped[target] = MappedTensor(target, tensor, heads)
        self._refuse_unknown(set(self.tensors) - used)
        return mapped

    def _refuse_unknown(self, names: set[str]) -> None:
        # Old converters stored RoPE's frequencies for each layer; they follow from the base.
        unknown = sorted(name for name in names if not re.search(r"\.attn_rot_embd\.", name))
        if unknown:
            shown = ", ".join(unknown[:UNLISTED_SHOWN])
            more = f" and {len(unknown) - UNLISTED_SHOWN} more" * (len(unknown) > UNLISTED_SHOWN)
            self.fail(
                f"holds tensors that the architecture '{self.architecture.name}' does not have: "
                f"{shown}{more}"
            )
