"""Modules from elsewhere: plain SDPA, caches of their own, and how they are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bessemer.errors import UnsupportedError, UsageError
from bessemer.graph import print_graph
from bessemer.importer import import_model, reference_logits
from tests.importer.cases import TOLERANCE, difference, run
from tests.importer.modules import CONTEXT, VOCAB, OwnCache, Plain, RankOne, seeded

IDS = np.random.default_rng(1).integers(0, VOCAB, 13).tolist()
MODULES = [
    Plain,
    RankOne,
    lambda: OwnCache("index"),
    lambda: OwnCache("copy"),
    lambda: OwnCache("stacked"),
]


@pytest.mark.parametrize("make", MODULES, ids=["plain", "rank_one", "index", "copy", "stacked"])
def test_a_module_imports_whole_and_in_chunks(make: Callable[[], torch.nn.Module]) -> None:
    module = seeded(make())
    found = import_model(module)
    expected = reference_logits(found)(IDS)
    with torch.no_grad():  # the module itself, whose buffers must still be at zero
        shape = (1, 13) if found.token_rank == 2 else (13,)
        inputs = (torch.tensor(IDS).reshape(shape), torch.arange(13).reshape(shape))
        direct = copy.deepcopy(module)(*inputs).reshape(13, VOCAB)
    assert np.array_equal(expected, direct.numpy())
    for chunks in ((), (5, 1, 1, 4), (1,) * 12):
        assert difference(run(found, IDS, chunks), expected) < TOLERANCE
    assert (found.vocab_size, found.context_length) == (VOCAB, CONTEXT)
    assert (found.config, found.rope) == ({}, None)
    assert print_graph(import_model(module, capture="dynamo").graph) == print_graph(found.graph)
    assert reference_logits(found)(IDS[:4]).shape == (4, VOCAB)  # state starts again


def test_names_and_layers() -> None:
    found = import_model(seeded(Plain(layers=3)))
    layers = [n.attrs["layer"] for n in found.graph if n.op == "attention"]
    assert layers == [0, 1, 2]
    names = {n.attrs["name"] for n in found.graph if n.op == "param"}
    assert "model.2.qkv.weight" in names
    assert names == set(found.checkpoint.names())
    places = {n.loc.split(" ")[0] for n in found.graph if n.op == "linear"}
    assert "model.0.down" in places


def test_state() -> None:
    found = import_model(seeded(OwnCache()))
    assert set(found.graph.updates) == {"k", "v", "seen"}
    states = {n.attrs["name"]: n.types[0] for n in found.graph if n.op == "state"}
    assert str(states["seen"]) == f"i64[{CONTEXT}]"


def test_large_buffers_are_weights_not_constants() -> None:
    class Tables(Plain):
        def __init__(self) -> None:
            super().__init__(1)
            wide = torch.linspace(-1, 1, 2 * VOCAB * CONTEXT).reshape(2 * CONTEXT, VOCAB)
            self.register_buffer("wide", wide, persistent=False)
            self.register_buffer("small", torch.arange(VOCAB) / 7, persistent=False)

        def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            table = self.wide if self.wide.numel() > 1024 else self.small
            return super().forward(ids, positions) + table[positions] + self.small

    class Larger(Tables):
        def __init__(self) -> None:
            super().__init__()
            self.wide = self.wide.repeat(2, 1)

    module = seeded(Larger())
    found = import_model(module)
    expected = reference_logits(found)(IDS)
    assert difference(run(found, IDS), expected) < TOLERANCE
    assert "wide" in found.checkpoint.names()
    assert "small" not in found.checkpoint.names()
    assert np.array_equal(found.checkpoint.read_stored("wide"), module.wide.numpy())
    assert np.array_equal(found.checkpoint.read("wide", range(2, 5)), module.wide.numpy()[2:5])
    double = reference_logits(found, lambda name: found.checkpoint.read(name) * 2)(IDS)
    assert difference(double, expected) > 0.1


def test_fingerprints_follow_the_weights() -> None:
    """C15"""
    module = seeded(Plain())
    before = import_model(module).checkpoint.fingerprint()
    assert import_model(seeded(Plain())).checkpoint.fingerprint() == before
    with torch.no_grad():
        module.places.weight[3, 3] += 1e-6  # type: ignore[operator, index]
    assert import_model(module).checkpoint.fingerprint() != before


# --- refusals ------------------------------------------------------------------------------------


class Refused(Plain):
    """A plain model whose logits are changed by `change(self, logits, ids, positions)`."""

    def __init__(self, change: Callable[..., torch.Tensor]) -> None:
        super().__init__(1)
        self.change = change
        self.register_buffer("ones", torch.ones(CONTEXT))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.change(self, super().forward(ids, positions), ids, positions)


def unknown(self: Refused, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    y = torch.special.bessel_j0(x)
    return torch.fft.fft(y, dim=-1).real


def single(self: Refused, x: torch.Tensor, ids: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x if ids.shape[-1] > 1 else x * 2


def longer(self: Refused, x: torch.Tensor, ids: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x * 2 if ids.shape[-1] >= 5 else x


def by_data(self: Refused, x: torch.Tensor, ids: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    if ids.sum() > 3:
        x = x * 2
    if x.max() > 5:
        x = x + 1
    return x


def fixed(self: Refused, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(6, 1)


def length_as_number(
    self: Refused, x: torch.Tensor, ids: torch.Tensor, *_: torch.Tensor
) -> torch.Tensor:
    return x / ids.shape[-1]


def masked(self: Refused, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).tril()
    q = x.unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).squeeze(1)


def not_causal(self: Refused, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    q = x.unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q).squeeze(1)


def running_sum(self: Refused, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-2)


def last_row(self: Refused, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x[:, -1:]


def counts(self: Refused, x: torch.Tensor, ids: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(ids.shape[-1])[:, None]


def starts_at_one(
    self: Refused, x: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    self.ones[positions[0]] = ids[0] * 0.5
    return x + self.ones[positions[0]][:, None]


def writes_a_weight(self: Refused, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    self.tokens.weight.mul_(0.5)  # type: ignore[operator, union-attr]
    return x


def two_results(self: Refused, x: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x, x


HERE = r"test_import_modules\.py:\d+"
REFUSALS = [
    (unknown, rf"2 operations.*\n.*bessel_j0.*{HERE}.*\n.*fft.*{HERE}"),
    (single, rf"branches on the number of tokens.*T > 1.*{HERE}"),
    (longer, rf"branches on the number of tokens.*T >= 5.*{HERE}"),
    (by_data, rf"2 places break it:\n.*{HERE}.*\n.*{HERE}"),
    (fixed, r"branches on the number of tokens.*6"),
    (length_as_number, rf"{HERE}.*may not depend on the length"),
    (masked, rf"scaled_dot_product_attention.*{HERE}.*explicit mask"),
    (not_causal, rf"{HERE}.*not causal"),
    (running_sum, rf"mix the tokens.*\n.*cumsum.*{HERE}"),
    (last_row, "logits"),
    (counts, rf"mix the tokens.*\n.*iota.*{HERE}"),
    (starts_at_one, r"ones.*does not start at zero"),
    (writes_a_weight, r"tokens\.weight is written"),
    (two_results, "one tensor"),
]


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[c.__name__ for c, _ in REFUSALS])
def test_refused(
    change: Callable[..., torch.Tensor], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """C01, and everything that would be silently wrong for another length or chunk."""
    with pytest.raises(UnsupportedError, match=message):
        import_model(Refused(change))
    assert capfd.readouterr() == ("", "")


def test_an_unknown_capture_way() -> None:
    with pytest.raises(UsageError, match="dynamo"):
        import_model(Plain(), capture="script")
