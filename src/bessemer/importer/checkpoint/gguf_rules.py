"""What the description of a GGUF architecture is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bessemer.importer.checkpoint.gguf_file import GGUFTensor

if TYPE_CHECKING:
    from bessemer.importer.checkpoint.gguf_architectures import ArchitectureReader


@dataclass(frozen=True)
class TensorRule:
    """How one tensor (or one tensor of every layer) is called and shaped.

    Attributes:
        source: name in the GGUF, without ``blk.N.`` for a layer's tensor.
        other_sources: names that some writers use instead.
        target: transformers' name, without ``model.layers.N.``.
        dims: the names of its dimensions, outermost first; see `dimensions`.
        required: whether a file without it is incomplete.
        heads: which head count its rows are permuted by, if the architecture permutes.
    """

    source: str
    target: str
    dims: tuple[str, ...]
    required: bool = True
    heads: str | None = None
    other_sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class MappedTensor:
    """A tensor of the file under transformers' name; `permuted_heads` is the head count by whose
    rows it is interleaved, or 0."""

    name: str
    tensor: GGUFTensor
    permuted_heads: int


GLOBAL_RULES = (
    TensorRule("token_embd.weight", "model.embed_tokens.weight", ("vocab", "hidden")),
    TensorRule("output_norm.weight", "model.norm.weight", ("hidden",)),
    TensorRule("output.weight", "lm_head.weight", ("vocab", "hidden"), required=False),
)

NORMS = (
    TensorRule("attn_norm.weight", "input_layernorm.weight", ("hidden",)),
    TensorRule("ffn_norm.weight", "post_attention_layernorm.weight", ("hidden",)),
)


@dataclass(frozen=True)
class Architecture:
    """One GGUF architecture.

    Attributes:
        name: general.architecture, and the prefix of its keys.
        model_type: transformers' model_type.
        model_class: transformers' class for text generation.
        layer_rules: the tensors of each layer.
        permutes: whether q and k rows are stored interleaved (rotary pairs side by side).
        config: further entries of config.json.
        adjust: last changes to the configuration, by the file's metadata and tensor names.
        configure: makes the whole configuration, where the general way does not fit.
        understood: of the keys that are refused in general, those that `configure` reads.
        more_rules: further tensors of a layer, by the configuration and the layer's number.
        more_dimensions: further names of dimensions, by the configuration.
        global_rules: the tensors that are in no layer.
    """

    name: str
    model_type: str
    model_class: str
    layer_rules: tuple[TensorRule, ...]
    permutes: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    adjust: Callable[[ArchitectureReader, dict[str, Any]], None] | None = None
    configure: Callable[[ArchitectureReader], dict[str, Any]] | None = None
    understood: frozenset[str] = frozenset()
    more_rules: Callable[[dict[str, Any], int], tuple[TensorRule, ...]] | None = None
    more_dimensions: Callable[[dict[str, Any]], dict[str, int]] | None = None
    global_rules: tuple[TensorRule, ...] = GLOBAL_RULES

    def rules_of(self, config: dict[str, Any], layer: int) -> tuple[TensorRule, ...]:
        """The tensors of one layer."""
        more = self.more_rules(config, layer) if self.more_rules else ()
        return (*self.layer_rules, *more)

    def dimensions(self, config: dict[str, Any]) -> dict[str, int]:
        """The sizes that rules name."""
        head, heads = config["head_dim"], config["num_attention_heads"]
        kv = head * config["num_key_value_heads"]
        sizes = {
            "vocab": config["vocab_size"],
            "hidden": config["hidden_size"],
            "head": head,
            "q": head * heads,
            "kv": kv,
            "qkv": head * heads + 2 * kv,
        }
        if "intermediate_size" in config:
            sizes["ffn"] = config["intermediate_size"]
            sizes["gate_up"] = 2 * config["intermediate_size"]
        return {**sizes, **(self.more_dimensions(config) if self.more_dimensions else {})}
