"""The ATen table, op by op: the graph's NumPy reference against PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bessemer.graph import evaluate
from bessemer.importer import (
    import_model,
    rope,  # noqa: F401  (registers its op)
)
from bessemer.importer.aten import TABLE

WIDTH = 12
Fn = Callable[[Tensor, Tensor], Tensor]

WEIGHT = torch.linspace(-1, 1, 7 * WIDTH).reshape(7, WIDTH)
ROW = torch.linspace(-2, 2, WIDTH)
PICK = torch.tensor([3, 0, -1, 5])


class OneOp(torch.nn.Module):
    """Embeds the ids to x f32[1, T, 12], applies `fn(x, positions)`, flattens the rest."""

    def __init__(self, fn: Fn) -> None:
        super().__init__()
        self.fn = fn
        generator = torch.Generator().manual_seed(3)
        self.table = torch.nn.Parameter(torch.randn(11, WIDTH, generator=generator))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        result = self.fn(self.table[ids], positions)
        return result.float().flatten(2) if result.dim() > 2 else result.float()[..., None]


def heads(x: Tensor) -> Tensor:
    return x.view(1, x.shape[1], 3, 4)


def written(x: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    """A copy of x after an in-place operation."""
    y = x.clone()
    write(y)
    return y


def build_key(x: Tensor) -> Tensor:
    """Two halves written into an empty tensor, as DeepSeek does."""
    y = x.new_empty(*x.shape[:-1], 20)
    y[..., :12].copy_(x)
    y[..., 12:].copy_(x[..., :8] * 2)
    return y


def in_regions(x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x * 2
        with torch.autocast("cpu", enabled=False):
            y = x.sin()
    return x + y


def from_a_copy(x: Tensor) -> Tensor:
    """`long` copies, so that the in-place write does not reach x."""
    y = x.long()
    y.add_(3)
    z = x.float()  # the same tensor: this write does
    z.mul_(2)
    return x + y


def scattered_mask(x: Tensor) -> Tensor:
    mask = torch.zeros_like(x[0])
    mask.scatter_(1, x[0].topk(3, sorted=False)[1], 1)
    return x.masked_fill(~mask.bool(), float("-inf")).softmax(-1)


def put_columns(x: Tensor, accumulate: bool) -> Tensor:
    y = x.clone()
    y.index_put_(
        (torch.tensor([0]), torch.tensor([0]), PICK), torch.tensor(2.0), accumulate=accumulate
    )
    return y


CASES: dict[str, Fn] = {
    # elementwise
    "neg_abs_exp": lambda x, p: (-x).abs().exp(),
    "log_log1p": lambda x, p: x.abs().add(1).log() + x.abs().log1p(),
    "sqrt_rsqrt_reciprocal": lambda x, p: x.abs().sqrt() + (x.abs() + 1).rsqrt() + 1 / (x + 9),
    "sin_cos_erf": lambda x, p: x.sin() + x.cos() * torch.erf(x),
    "floor_ceil": lambda x, p: x.floor() + 2 * x.ceil(),
    "activations": lambda x, p: F.relu(x) + F.silu(x) + x.sigmoid() * x.tanh(),
    "gelu": lambda x, p: F.gelu(x) + 2 * F.gelu(x, approximate="tanh"),
    "softplus": lambda x, p: F.softplus(x) + F.softplus(x, beta=2) + F.logsigmoid(x),
    "mish_leaky_elu": lambda x, p: F.mish(x) + F.leaky_relu(x, 0.2) + F.elu(x, 1.5),
    "relu6": lambda x, p: F.relu6(x * 4),
    "clamps": lambda x, p: x.clamp(-0.5, 0.7) + x.clamp(min=0.1) + x.clamp_max(0.2) + F.hardtanh(x),
    "pow": lambda x, p: x**2 + x.abs() ** 0.5 + 2.0**x + x.abs().pow(x) + x.square() + x.exp2(),
    "add_alpha": lambda x, p: torch.add(x, x * 2, alpha=3) + torch.sub(x, 1, alpha=2) + (3 - x),
    "div": lambda x, p: x / 3 + 2 / (x + 9) + x / (x + 9) + (x // 0.5) + x % 0.7,
    "div_floor": lambda x, p: torch.div(x, 0.3, rounding_mode="floor"),
    "integers": lambda x, p: (p * 3 + 7) // 2 + (p + 5) % 3 - p,
    "integer_true_division": lambda x, p: p / 4,
    "mixed_types": lambda x, p: x + p[..., None] * (x > 0),
    "compare": lambda x, p: (x > 0) & (x <= 1) | (x == 0) ^ (x != 0.5) | ~(x < -1),
    "compare_mixed": lambda x, p: (p > 2.5) | (p[..., None] >= x)[..., 0] | (p == 1),
    "logical": lambda x, p: torch.logical_and(x, x > 0) | torch.logical_not(x),
    "maximum": lambda x, p: torch.maximum(x, ROW) + torch.minimum(x, ROW * 0.5),
    "where": lambda x, p: torch.where(x > 0, x, 0.0) + torch.where(x > 1, 1.0, x),
    "isnan_isinf": lambda x, p: torch.isnan(x) | torch.isinf(x / 0),
    "masked_fill": lambda x, p: x.masked_fill(x > 0, -3.0),
    "casts": lambda x, p: x.to(torch.float16).float() + x.long() + x.bool().int() + x.type_as(p),
    "complex": lambda x, p: torch.view_as_real(
        torch.view_as_complex(x.view(*x.shape[:-1], 6, 2)) * torch.polar(ROW[:6].abs(), ROW[6:])
    ),
    "complex_scale": lambda x, p: (torch.view_as_complex(x.view(1, -1, 6, 2)) * 2).imag,
    # views
    "permute": lambda x, p: heads(x).permute(0, 1, 3, 2).flatten(2),
    "transpose": lambda x, p: heads(x).transpose(-1, -2).reshape(1, -1, 12),
    "unflatten_squeeze": lambda x, p: x.unflatten(-1, (3, 4)).unsqueeze(2).squeeze(2),
    "movedim": lambda x, p: torch.movedim(heads(x), -1, 2),
    "slices": lambda x, p: x[..., 2:-1:3] + x[..., -4:-1],
    "select_narrow": lambda x, p: x[..., 3, None] + x[..., -2, None] + x.narrow(-1, 2, 5),
    "chunk": lambda x, p: torch.cat(x.chunk(5, -1)[::-1], -1),
    "split": lambda x, p: torch.cat([part * i for i, part in enumerate(x.split(5, -1))], -1),
    "split_sizes": lambda x, p: x.split([3, 4, 5], -1)[1],
    "unbind": lambda x, p: heads(x).unbind(2)[1] * heads(x).unbind(-1)[0].sum(-1, keepdim=True),
    "stack": lambda x, p: torch.stack((x, -x), -1) + torch.stack((x, -x), 2).transpose(-1, -2),
    "cat": lambda x, p: torch.cat((x, x > 0, torch.zeros(0)), -1),
    "repeat": lambda x, p: x.repeat(1, 1, 2) + torch.tile(x, (2,)),
    "repeat_interleave": lambda x, p: heads(x).repeat_interleave(2, dim=2),
    "expand": lambda x, p: x[..., None, :].expand(-1, -1, 3, -1),
    "expand_as": lambda x, p: ROW.expand_as(x) + ROW.broadcast_to(x.shape) + x,
    "flip_roll": lambda x, p: x.flip(-1) + x.roll(5, -1) + x.roll((1, 2), (2, 2)),
    "pad": lambda x, p: F.pad(x, (2, 1), value=0.5) + F.pad(x, (-1, 4)),
    # reductions
    "sums": lambda x, p: x.sum(-1, keepdim=True) + heads(x).sum((2, 3))[..., None],
    "sum_of_bools": lambda x, p: (x > 0).sum(-1),
    "means": lambda x, p: x.mean(-1, keepdim=True) + heads(x).mean((-1, -2))[..., None],
    "extremes": lambda x, p: x.amax(-1, True) * x.amin(-1, True) + x.max(-1)[0][..., None],
    "indices": lambda x, p: x.max(-1)[1] + 100 * x.argmin(-1) + x.argmax(-1) + x.min(-1)[1],
    "prod_any_all": lambda x, p: x.prod(-1) + (x > 1).any(-1) + (x > -1).all(-1),
    "var": lambda x, p: x.var(-1) + 2 * x.std(-1) + 3 * x.var(-1, unbiased=False),
    "var_correction": lambda x, p: x.var(-1, correction=2, keepdim=True),
    "norm": lambda x, p: F.normalize(x, dim=-1) + torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "softmax": lambda x, p: x.softmax(-1) + heads(x).log_softmax(2).flatten(2),
    "logsumexp": lambda x, p: x.logsumexp(-1, True) + x.logsumexp(-1)[..., None],
    "cumsum": lambda x, p: x.cumsum(-1) + (x > 0).cumsum(-1),
    "topk": lambda x, p: torch.cat((x.topk(3)[0], x.topk(2, largest=False)[1], x.topk(2)[1]), -1),
    "topk_middle": lambda x, p: heads(x).topk(2, dim=2)[0],
    "sort": lambda x, p: x.sort(-1)[0] + x.sort(-1, descending=True)[1] + x.argsort(-1),
    # contractions
    "linear": lambda x, p: F.linear(x, WEIGHT) + F.linear(x, WEIGHT, torch.arange(7.0)),
    "matmul": lambda x, p: x @ WEIGHT.T + torch.bmm(x, WEIGHT.T[None]),
    "matmul_vector": lambda x, p: x @ ROW + torch.mv(x[0], ROW)[None],
    "matmul_heads": lambda x, p: heads(x) @ heads(x).transpose(-1, -2),
    "addmm": lambda x, p: torch.addmm(ROW[:7], x[0], WEIGHT.T, beta=2, alpha=0.5)[None],
    "einsum": lambda x, p: torch.einsum("bthd,nd->btnh", heads(x), WEIGHT[:, :4]),
    "einsum_swapped": lambda x, p: torch.einsum("nd,bthd->btnh", WEIGHT[:, :4], heads(x)),
    "einsum_no_rows": lambda x, p: torch.einsum("bth,bthe->bte", heads(x)[..., 0], heads(x)),
    "einsum_batch": lambda x, p: torch.einsum("bthd, bthe -> bted", heads(x), heads(x * 2)),
    "einsum_one": lambda x, p: torch.einsum("bthd->btd", heads(x)),
    "layer_norm": lambda x, p: F.layer_norm(x, (12,)) + F.layer_norm(x, (12,), ROW, ROW, 0.1),
    "layer_norm_weight": lambda x, p: F.layer_norm(x, (12,), ROW),
    "rms_norm": lambda x, p: F.rms_norm(x, (12,), eps=0.1) + F.rms_norm(x, (12,), ROW),
    "dropout": lambda x, p: F.dropout(x, 0.5, training=False),
    "glu": lambda x, p: x[..., :6] * F.silu(x[..., 6:]),
    # creation and indexing
    "creation": lambda x, p: torch.full_like(x, 2) + x * torch.ones(12) + x.new_zeros(12),
    "creation_new": lambda x, p: x + x.new_full((1,), 3) + torch.full((12,), 0.5),
    "arange": lambda x, p: x + torch.arange(12) + torch.arange(2, 26, 2) + torch.arange(0, 6, 0.5),
    "triangles": lambda x, p: x @ torch.ones(12, 12).tril(1) + x @ torch.ones(12, 12).triu(-2),
    "one_hot": lambda x, p: F.one_hot(p % 5, 7),
    "gather": lambda x, p: x.gather(-1, x.topk(3)[1]),
    "index_select": lambda x, p: x.index_select(-1, torch.tensor([3, 1, 1])),
    "index": lambda x, p: x[..., PICK] + ROW[p % 12][..., None] + WEIGHT[p % 7, p % 12][..., None],
    "index_matrix": lambda x, p: WEIGHT[torch.tensor([[0, -1], [2, 3]])].sum((0, 1)) + x,
    "scatter": lambda x, p: x.scatter(-1, x.topk(3)[1], -x) + x.scatter_add(-1, x.topk(2)[1], x),
    "scattered_mask": lambda x, p: scattered_mask(x),
    "index_add": lambda x, p: x.index_add(-1, torch.tensor([1, 1]), x[..., :2], alpha=2),
    "index_copy": lambda x, p: x.index_copy(-1, torch.tensor([4, 1]), x[..., :2] * 9),
    "index_fill": lambda x, p: x.index_fill(-1, torch.tensor([4, 1]), 7.0),
    # in-place
    "in_place_arithmetic": lambda x, p: written(x, lambda y: y.mul_(2).add_(1).div_(3).sub_(x)),
    "in_place_slice": lambda x, p: written(x, lambda y: y[..., 2:5].add_(1)),
    "in_place_strided": lambda x, p: written(x, lambda y: y[..., ::2].mul_(-1)),
    "in_place_select": lambda x, p: written(x, lambda y: y[..., 3].fill_(5)),
    "in_place_view": lambda x, p: written(x, lambda y: heads(y).transpose(2, 3)[..., 1:].zero_()),
    "in_place_chunk": lambda x, p: written(x, lambda y: y.chunk(3, -1)[1].mul_(10)),
    "in_place_narrow": lambda x, p: written(x, lambda y: y.narrow(-1, 1, 3).copy_(ROW[:3])),
    "in_place_masked": lambda x, p: written(x, lambda y: y.masked_fill_(y > 0, 1.0)),
    "in_place_read_through": lambda x, p: (lambda y, v: (y.add_(1), v * 2)[1])(
        z := x.clone(), z[..., :4]
    ),
    "in_place_on_copies": lambda x, p: from_a_copy(x.clone()),
    "regions": lambda x, p: in_regions(x),
    "written_halves": lambda x, p: build_key(x),
}


@pytest.mark.parametrize("name", CASES)
def test_the_graph_form_equals_pytorch(name: str) -> None:
    module = OneOp(CASES[name])
    found = import_model(module)
    for count in (1, 5):
        ids = (torch.arange(count) * 7 % 11)[None]
        positions = torch.arange(2, 2 + count)[None]
        with torch.no_grad():
            expected = module(ids, positions).numpy()
        inputs = {"ids": ids.numpy(), "positions": positions.numpy()}
        got = evaluate(found.graph, inputs, found.checkpoint.read)["logits"]
        if name != "casts":  # float16 computes in f32 here
            np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
        else:
            np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3)


def test_halves_are_put_together_without_the_empty_tensor() -> None:
    graph = import_model(OneOp(CASES["written_halves"])).graph
    assert graph.op_counts()["concat"] == 1
    assert "expand" not in graph.op_counts()


def test_the_table_has_only_known_ops() -> None:
    for name in TABLE:
        space, op, overload = name.split(".")
        packet = getattr(getattr(torch.ops, space), op)
        assert overload in packet.overloads(), name
