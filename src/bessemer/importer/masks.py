"""Which window each attention layer has: asked of the mask that transformers would build.

An attention function is told a window too, but eager attention, which is the reference, obeys the
mask alone, and some models pass one without the other. So the model runs once on fake tensors with
masks that are descriptions: causal, or causal within a window; all else is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from bessemer.errors import UnsupportedError

PROBE = "bessemer_probe"
# The longest window that is told apart from full attention.
_LONGEST = 1 << 20
_ROWS = (0, 1, 2, 7, 100, 4095, 4096, 4097)
_TOKENS = 5


@dataclass(frozen=True)
class Mask:
    """What stands for a mask in the probing run.

    window: 0 is full causal attention.  refusal: why the mask can't be compiled, if it can't; a
    mask that no layer uses may be anything.
    """

    window: int
    refusal: str = ""

    def __getitem__(self, index: Any) -> Mask:
        """Models that cut the mask to the number of keys keep its meaning."""
        return self


def describe(mask_function: Callable[..., torch.Tensor]) -> Mask:
    """What a transformers mask function (of batch, head, query and key index) means."""
    keys = torch.arange(_LONGEST + 8)
    zero = torch.zeros((), dtype=torch.long)

    def allowed(row: int) -> torch.Tensor:
        return mask_function(zero, zero, torch.tensor(row), keys).expand(keys.shape)

    try:
        count = int(allowed(_LONGEST - 1).sum())
        window = 0 if count == _LONGEST else count
        for row in (*_ROWS, window, window + 1, _LONGEST - 1):
            expected = keys <= row
            if window:
                expected &= keys > row - window
            if not torch.equal(allowed(row), expected):
                return Mask(0, "an attention mask neither causal nor a causal sliding window")
    except Exception as error:
        return Mask(0, f"an attention mask that depends on the data ({error})")
    return Mask(window)


def _mask(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Mask:
    """The mask function of the probing run."""
    with unset_fake_temporarily():
        return describe(mask_function)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of the probing run: notes the window on the module."""
    if not isinstance(attention_mask, Mask):
        raise UnsupportedError(
            f"{type(module).__name__} gets no causal mask, or one with a bias (such as ALiBi)"
        )
    if attention_mask.refusal:
        raise UnsupportedError(f"{type(module).__name__} has {attention_mask.refusal}")
    module.bessemer_window = attention_mask.window
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return value.new_empty(shape), None


AttentionInterface.register(PROBE, _attention)
AttentionMaskInterface.register(PROBE, _mask)


def note_windows(model: PreTrainedModel) -> None:
    """Give every attention module of a model (a copy of ours) its `bessemer_window`.

    Raises UnsupportedError for masks that Bessemer's attention op doesn't have.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(PROBE)
    name = type(model).__name__
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            ids = torch.zeros(1, _TOKENS, dtype=torch.long)
            # an explicit mask keeps transformers from looking for packed sequences
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    except UnsupportedError as error:
        raise UnsupportedError(f"{name}: {error}") from error
    except (TypeError, AttributeError) as error:
        if Mask.__name__ not in str(error):
            raise UnsupportedError(f"{name} does not run: {error}") from error
        raise UnsupportedError(
            f"{name} computes with its attention mask (a bias such as ALiBi): {error}"
        ) from error
    except Exception as error:
        raise UnsupportedError(f"{name} does not run on token ids alone: {error}") from error
    finally:
        model.set_attn_implementation(before)
