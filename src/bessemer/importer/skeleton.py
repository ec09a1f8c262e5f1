"""Models without weights: what is captured has every parameter's shape and none of its memory.

A stand-in is one zero, expanded to the parameter's shape on the CPU: exporting only looks at
shapes. Buffers that no checkpoint holds (rotary frequencies) are real, in f32, whatever the dtype
of the model.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from bessemer.errors import BessemerError, CheckpointError, UnsupportedError
from bessemer.importer import experts  # noqa: F401  (registers the experts op)
from bessemer.importer.attention import IMPLEMENTATION
from bessemer.importer.refusals import why_refused
from bessemer.models import DefinitionOptions, define

log = logging.getLogger(__name__)


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor of that shape that holds one number; f32 if it is a float."""
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return torch.zeros((), dtype=dtype).expand(tensor.shape)


def stand_in_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(stand_in(tensor), requires_grad=False)
    # transformers' init functions leave alone what carries this mark (it can't be written)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    return parameter


def read_config(config: dict[str, Any]) -> PreTrainedConfig:
    """The config object of a config.json.

    Raises UnsupportedError for an unknown model type, CheckpointError for values that transformers
    refuses.
    """
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UnsupportedError(f"config.json: model_type {kind!r} is not known to transformers")
    try:
        return CONFIG_MAPPING[kind].from_dict(config)
    # Each architecture has checks of its own, and they raise what they like.
    except Exception as error:
        raise CheckpointError(
            f"config.json: transformers refuses it for model_type {kind!r}: "
            f"{why_refused(error, config)}"
        ) from error


def from_config(config: PreTrainedConfig) -> PreTrainedModel:
    """A causal language model of that config whose parameters are stand-ins."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedError(f"model_type {config.model_type!r} has no causal language model")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            )
    # Values that no check of the config looks at fail in the model's own code.
    except Exception as error:
        raise CheckpointError(
            f"config.json: no {config.model_type} model can be made of it: "
            f"{why_refused(error, config.to_dict())}"
        ) from error
    model.eval()
    replaced: dict[int, torch.Tensor] = {}
    for module in model.modules():
        fresh = [n for n in module._buffers if n in module._non_persistent_buffers_set]
        for name, tensor in module._parameters.items():
            if tensor is not None:
                module._parameters[name] = replaced.setdefault(
                    id(tensor), stand_in_parameter(tensor)
                )
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in fresh:
                module._buffers[name] = stand_in(tensor)
        compute_buffers(model, module, fresh)
    model.tie_weights()
    return model


def from_definition(config: PreTrainedConfig, options: DefinitionOptions) -> torch.nn.Module:
    """Bessemer's own definition of that config, its parameters stand-ins."""
    try:
        with torch.device("meta"):
            model = define(config, options)
    except BessemerError:
        raise
    # Values that no check of the config looks at fail in the model's own code.
    except Exception as error:
        raise CheckpointError(
            f"config.json: no {config.model_type} model can be made of it: "
            f"{why_refused(error, config.to_dict())}"
        ) from error
    model.eval()
    replaced: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                module._parameters[name] = replaced.setdefault(
                    id(tensor), stand_in_parameter(tensor)
                )
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = stand_in(buffer)
    return model


def compute_buffers(model: PreTrainedModel, module: torch.nn.Module, names: list[str]) -> None:
    """Give a module's non-persistent buffers their values, as transformers does on loading."""
    held = [n for n in names if module._buffers[n] is not None]
    for name in held:
        tensor = module._buffers[name]
        assert tensor is not None
        if tensor.is_floating_point():
            module._buffers[name] = torch.full(tensor.shape, torch.nan, dtype=torch.float32)
        else:
            module._buffers[name] = torch.full(tensor.shape, -1, dtype=tensor.dtype)
    if not held:
        return
    with torch.no_grad():
        model._init_weights(module)
    for name in held:
        tensor = module._buffers[name]
        assert tensor is not None
        if tensor.is_meta or not tensor.is_floating_point() or tensor.isnan().any():
            raise UnsupportedError(
                f"{type(module).__name__}.{name}: transformers doesn't compute this buffer"
            )


def without_weights(module: torch.nn.Module) -> torch.nn.Module:
    """A copy whose parameters are stand-ins, in eval mode; the module itself stays as it is."""
    memo: dict[int, Any] = {id(p): stand_in_parameter(p) for p in module.parameters()}
    for buffer in module.buffers():
        real = buffer.detach().to("cpu")
        memo[id(buffer)] = real.to(torch.float32) if real.is_floating_point() else real
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise UnsupportedError(
            f"{type(module).__name__} can't be copied for capture: {error}"
        ) from error
    copied.eval()
    if isinstance(copied, PreTrainedModel):
        for part in copied.modules():
            names = [n for n in part._buffers if n in part._non_persistent_buffers_set]
            if any(b.dtype != torch.float32 for b in _original(module, copied, part, names)):
                compute_buffers(copied, part, names)
    return copied


def _original(
    module: torch.nn.Module, copied: torch.nn.Module, part: torch.nn.Module, names: list[str]
) -> list[torch.Tensor]:
    """The float buffers of the original module that `part` of its copy stands for."""
    path = next(path for path, m in copied.named_modules() if m is part)
    buffers = [module.get_submodule(path)._buffers[n] for n in names]
    return [b for b in buffers if b is not None and b.is_floating_point()]


def use_ops(model: PreTrainedModel) -> None:
    """Let attention and experts of a model (a copy of ours) be our ops.

    Raises UnsupportedError when the model does not go through transformers' interfaces.
    """
    model.set_experts_implementation(IMPLEMENTATION)
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise UnsupportedError(
            f"{type(model).__name__} doesn't call transformers' attention interface, so its "
            "attention and cache can't be captured"
        )
