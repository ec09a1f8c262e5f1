"""Import a model: checkpoint or module in, graph and weight reader out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from bessemer.arguments import shown
from bessemer.errors import CheckpointError, UnsupportedError, UsageError
from bessemer.graph import Graph, Node, TensorType, Value, evaluate_value, param, verify
from bessemer.importer import rope
from bessemer.importer.architectures import SUPPORTED, check_config
from bessemer.importer.capture import CausalLM, export
from bessemer.importer.capture_errors import ModelRaised
from bessemer.importer.checkpoint import Checkpoint, open_checkpoint
from bessemer.importer.convert import Converted, convert
from bessemer.importer.fx_nodes import type_of
from bessemer.importer.masks import note_windows
from bessemer.importer.refusals import in_file
from bessemer.importer.rows import check_rows
from bessemer.importer.skeleton import (
    from_config,
    from_definition,
    read_config,
    use_ops,
    without_weights,
)
from bessemer.importer.steering import make_steerable
from bessemer.importer.unused import refuse_missing, unused_tensors, warn_of_unused
from bessemer.importer.weights import (
    ModuleWeights,
    Resolver,
    WeightReader,
    WithExtra,
    tied_names,
)
from bessemer.models import DEFINED, DefinitionOptions, file_names

log = logging.getLogger(__name__)

Source: TypeAlias = str | Path | Checkpoint | torch.nn.Module
# The context of a module that doesn't say how long its sequences may be.
DEFAULT_CONTEXT = 4096
# The kind of checkpoint that knows shapes alone, no numbers.
CONFIG_KIND = "config"


@dataclass(frozen=True)
class Imported:
    """A model as a graph, and where its weights are.

    Attributes:
        graph: inputs `ids` and `positions` i64[1, T] (and `sequence_length` i64[] where `rope` is
            set), output `logits` f32[1, T, vocab].
        config: what config.json holds; empty for a plain module.
        generation_config: likewise generation_config.json.
        checkpoint: reads the tensors that the graph's `param` nodes name.
        vocab_size: width of the logits.
        context_length: the longest sequence that the model itself allows.
        rope: {"kind": "longrope" | "dynamic", "threshold": tokens} when rotary frequencies
            depend on the length of the whole sequence, else None.
        capture: "export" or "dynamo".
        parameters: the model's own parameter names -> expressions over the checkpoint's tensors.
        module: the module that was imported; None for a checkpoint.
        token_rank: 2 when the module takes ids and positions [1, T], 1 when it takes [T].
        options: what was added to the model.
        unused: tensors of the checkpoint that have no part in the model.
    """

    graph: Graph
    config: dict[str, Any]
    generation_config: dict[str, Any]
    checkpoint: WeightReader
    vocab_size: int
    context_length: int
    rope: dict[str, Any] | None
    capture: str
    parameters: Mapping[str, Value] = field(repr=False)
    module: torch.nn.Module | None = field(repr=False, default=None)
    token_rank: int = 2
    options: DefinitionOptions = field(default_factory=DefinitionOptions)
    unused: Sequence[str] = ()


def import_model(
    source: Source, *, capture: str = "export", options: DefinitionOptions | None = None
) -> Imported:
    """Import a model.

    Args:
        source: a folder, GGUF file, hub name or alias; an opened `Checkpoint`; a transformers
            causal language model; or any module that maps token ids and positions, both i64[1, T]
            or both i64[T], to logits of every token. A module is not changed.
        capture: "export" (non-strict torch.export) or "dynamo" (strict, through TorchDynamo).
        options: what is added to the model; None for the plain one.

    Raises:
        CheckpointError: a tensor is missing, or has another shape than the config says.
        UnsupportedError: lists all that can't be compiled.
        UsageError: an unknown capture way, a source that is none, or an option that the
            architecture doesn't have.
    """
    options = options or DefinitionOptions()
    if isinstance(source, (str, Path)):
        source = open_checkpoint(source)
    if isinstance(source, Checkpoint):
        with in_file(source.config_file):
            return _import_checkpoint(source, capture, options)
    if isinstance(source, PreTrainedModel):
        stated = source.config.to_dict()
        check_config(stated)
        held = getattr(source, "generation_config", None)
        generation = {} if held is None else held.to_dict()
        weights = ModuleWeights(source)
        if stated["model_type"] in DEFINED:
            return _import_defined(
                source.config, weights, stated, generation, capture, options, module=source
            )
        _check_options(stated["model_type"], options)
        return _import_causal_lm(
            _checked_copy(source), weights, stated, generation, capture, options, module=source
        )
    if isinstance(source, torch.nn.Module):
        name = type(source).__name__
        _check_options(name, options)
        if options.steering:
            raise UsageError(f"--steering: {name} is no transformers model, whose layers are known")
        return _import_module(source, capture)
    raise UsageError(
        f"{shown(source)} is no model: give a path, a hub name, an alias, a transformers model, or "
        "a torch module that maps token ids and positions to logits"
    )


def _import_checkpoint(source: Checkpoint, capture: str, options: DefinitionOptions) -> Imported:
    stated, generation = source.config, source.generation_config
    check_config(stated)
    config = read_config(stated)
    rope.log_default_base(stated, config.get_text_config())
    if config.model_type in DEFINED:
        return _import_defined(config, source, stated, generation, capture, options)
    _check_options(config.model_type, options)
    model = from_config(config)
    return _import_causal_lm(model, source, stated, generation, capture, options)


def _check_options(kind: str, options: DefinitionOptions) -> None:
    """Raises UsageError for what only Bessemer's own definitions have."""
    if options.low_precision:
        raise UsageError(
            f"--low-precision: {kind} has no low-precision steps; {', '.join(DEFINED)} has"
        )


def _import_defined(
    config: PreTrainedConfig,
    checkpoint: WeightReader,
    stated: dict[str, Any],
    generation_config: dict[str, Any],
    capture: str,
    options: DefinitionOptions,
    module: torch.nn.Module | None = None,
) -> Imported:
    """Import a model through the definition of its architecture in `bessemer.models`."""
    kind = str(config.model_type)
    definition = from_definition(config, options)
    converted, parameters, unused = _converted(
        definition,
        kind,
        checkpoint,
        tied_names(definition),
        capture,
        "",
        file_names=file_names(kind),
    )
    _checked(converted.graph)
    _every_layer_attends(converted.graph, kind, config.num_hidden_layers)
    _check_tables(definition, checkpoint, parameters)
    return _imported(
        converted,
        config=stated,
        generation_config=generation_config,
        checkpoint=checkpoint,
        limit=rope.context_limit(config),
        rope=None,
        capture=capture,
        parameters=parameters,
        module=module,
        options=options,
        unused=unused,
    )


def _check_tables(
    definition: torch.nn.Module, checkpoint: WeightReader, parameters: Mapping[str, Value]
) -> None:
    """Raises CheckpointError for a table of numbers (`table_limits` of a module) with others than
    0 to below its limit: code would read beyond what they number.
    """
    if getattr(checkpoint, "kind", "") == CONFIG_KIND:
        return
    for path, module in definition.named_modules():
        for name, limit in getattr(module, "table_limits", {}).items():
            table = evaluate_value(parameters[f"{path}.{name}"], checkpoint.read)
            wrong = table[~((table >= 0) & (table < limit) & (table == np.floor(table)))]
            if wrong.size:
                raise CheckpointError(
                    f"tensor {path}.{name} holds {wrong.size} numbers that are none from 0 to "
                    f"{limit - 1}, such as {wrong[0]:g}"
                )


def _checked_copy(model: PreTrainedModel) -> PreTrainedModel:
    copied = without_weights(model)
    assert isinstance(copied, PreTrainedModel)
    if not hasattr(copied, "lm_head") and copied.get_output_embeddings() is None:
        raise UnsupportedError(
            f"{type(model).__name__} has no language-model head; use the ForCausalLM class"
        )
    return copied


def _import_causal_lm(
    model: PreTrainedModel,
    checkpoint: WeightReader,
    config: dict[str, Any],
    generation_config: dict[str, Any],
    capture: str,
    options: DefinitionOptions,
    module: torch.nn.Module | None = None,
) -> Imported:
    """Import a transformers model whose parameters are stand-ins."""
    kind = str(config["model_type"])
    if kind not in SUPPORTED:
        log.warning("model_type %s has not been tested; run `bessemer verify`", kind)
    use_ops(model)
    length_rope = rope.make_exportable(model)
    note_windows(model)
    layers = model.config.get_text_config().num_hidden_layers
    if options.steering:
        make_steerable(model, layers)
    aliases = tied_names(model)
    converted, parameters, unused = _converted(
        CausalLM(model), kind, checkpoint, aliases, capture, "model."
    )
    _every_layer_attends(converted.graph, type(model).__name__, layers)
    return _imported(
        converted,
        config=config,
        generation_config=generation_config,
        checkpoint=checkpoint,
        limit=rope.context_limit(model.config.get_text_config()),
        rope=length_rope,
        capture=capture,
        parameters=parameters,
        module=module,
        options=options,
        unused=unused,
    )


def _import_module(module: torch.nn.Module, capture: str) -> Imported:
    """Import a module with token ids and positions in, logits out."""
    name = type(module).__name__
    checkpoint = ModuleWeights(module)
    errors = []
    for rank in (2, 1):
        copied = without_weights(module)
        try:
            converted, parameters, _ = _converted(
                copied, name, checkpoint, tied_names(copied), capture, "", rank
            )
        except ModelRaised as error:
            errors.append(error)  # perhaps it takes [T]
            continue
        _checked(converted.graph)
        limit = getattr(module, "max_position_embeddings", None)
        return _imported(
            converted,
            config={},
            generation_config={},
            checkpoint=checkpoint,
            limit=limit if isinstance(limit, int) else None,
            rope=None,
            capture=capture,
            parameters=parameters,
            module=module,
            token_rank=rank,
        )
    raise errors[0]


def _converted(
    module: torch.nn.Module,
    name: str,
    checkpoint: WeightReader,
    aliases: Mapping[str, list[str]],
    capture: str,
    prefix: str,
    rank: int = 2,
    file_names: Callable[[str], list[str]] | None = None,
) -> tuple[Converted, dict[str, Value], list[str]]:
    """The module's graph, its parameters' expressions, and what of the checkpoint is not used."""
    program = export(module, capture, rank=rank)
    resolver = Resolver(checkpoint, aliases, file_names)
    parameters: dict[str, Value] = {}

    def leaf(target: str, type_: TensorType) -> Value:
        if target not in parameters:
            parameters[target] = resolver(target, type_)
        return parameters[target]

    converted = convert(program, name, leaf, prefix=prefix)
    unused = unused_tensors(checkpoint, resolver, parameters, module, prefix)
    if resolver.missing:
        refuse_missing(checkpoint, resolver.missing, unused)
    warn_of_unused(unused)
    for extra, tensor in converted.extra.items():
        parameters[extra] = param(extra, type_of(tensor))
    return converted, parameters, unused


def _checked(graph: Graph) -> None:
    verify(graph)
    check_rows(graph)


def _every_layer_attends(graph: Graph, name: str, count: int) -> None:
    """Each layer must have gone through an attention op, or its cache would be lost."""
    layers = sorted(_number(n, "layer") for n in graph if n.op.endswith("attention"))
    if layers != list(range(count)):
        raise UnsupportedError(
            f"{name}: its {count} layers don't have one attention and KV cache "
            f"each; attention was called for layers {layers}"
        )


def _number(node: Node, name: str) -> int:
    value = node.attrs[name]
    assert isinstance(value, int)
    return value


def position_limit(graph: Graph) -> int | None:
    """The smallest table or state that positions index, if there is one."""
    limits = []
    for node in graph:
        if node.op in ("embedding", "take", "put") and _is_positions(node.inputs[1]):
            axis = -2 if node.op == "embedding" else _number(node, "axis")
            size = node.inputs[0].shape[axis]
            if isinstance(size, int):
                limits.append(size)
    return min(limits, default=None)


def _is_positions(value: Value) -> bool:
    while value.op in ("reshape", "slice", "expand", "permute", "cast"):
        value = value.node.inputs[0]
    return value.op == "input" and value.node.attrs["name"] == "positions"


def _imported(converted: Converted, *, limit: int | None, **fields: Any) -> Imported:
    graph = converted.graph
    limits = [n for n in (limit, position_limit(graph)) if n is not None]
    vocab = graph.outputs["logits"].shape[-1]
    assert isinstance(vocab, int)
    if converted.extra:
        fields["checkpoint"] = WithExtra(fields["checkpoint"], converted.extra)
    return Imported(
        graph=graph,
        vocab_size=vocab,
        context_length=min(limits, default=DEFAULT_CONTEXT),
        **fields,
    )
