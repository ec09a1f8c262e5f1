"""DeepSeek V4: our definition and its graph are transformers' model, whole, in chunks and in steps.

The reference is transformers' full forward without a cache. Compiled code is tested in
`tests/e2e/test_deepseek_v4.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.errors import CheckpointError, UnsupportedError, UsageError
from bessemer.graph import Env, Graph, evaluate
from bessemer.graph.ops.compressed import round_row
from bessemer.graph.ops.rounding import round_trip
from bessemer.importer import Imported, import_model, reference_logits
from bessemer.models import DefinitionOptions, define
from bessemer.steering import DIRECTIONS, SCALES
from tests.importer.cases import difference, eager, imported, tokens
from tests.importer.cases import model as tiny_model
from tests.tiny_models import V4_KINDS, tiny, tiny_config

# float32 on both sides, sums in another order. The issue asks for 1e-4.
TOLERANCE = 1e-5
COUNT = 70
ALONE = {"window": V4_KINDS[:1], "sparse": V4_KINDS[1:2], "heavy": V4_KINDS[2:]}
ROUTING = {"hash": ["hash_moe"], "learned": ["moe"]}


@cache
def one_layer(kind: str, routing: str = "learned", **over: Any) -> Any:
    return tiny(
        "deepseek_v4",
        num_hidden_layers=1,
        layer_types=ALONE[kind],
        mlp_layer_types=ROUTING[routing],
        **over,
    )[1]


def definition(model: Any) -> torch.nn.Module:
    """Our definition of a transformers model, with its weights."""
    found = define(model.config, DefinitionOptions())
    weights = {k: v.to(torch.float32) for k, v in model.state_dict().items()}
    assert found.load_state_dict(weights).missing_keys == []
    return found.eval()


def ours(module: torch.nn.Module, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return module(torch.tensor([ids]), torch.arange(len(ids))[None])[0].numpy()


def feed(found: Imported, env: Env, ids: list[int], begin: int, graph: Graph | None = None) -> Any:
    """Logits of ids at positions from `begin`, on the state of `env`."""
    at = np.arange(begin, begin + len(ids))
    inputs = {"ids": np.array([ids]), "positions": at[None]}
    return evaluate(graph or found.graph, inputs, found.checkpoint.read, env)["logits"][0]


# --- the definition in torch ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "routing"), [("window", "hash"), ("sparse", "learned"), ("heavy", "hash")]
)
def test_each_kind_of_layer_alone(kind: str, routing: str) -> None:
    """At every length, across every edge of blocks of 4 and 8 and of the window of 8."""
    model, ids = one_layer(kind, routing), tokens(COUNT)
    want, module = eager(model, ids), definition(model)
    assert difference(ours(module, ids), want) < TOLERANCE
    for length in range(1, COUNT):
        assert difference(ours(module, ids[:length])[-1], want[length - 1]) < TOLERANCE, length


def test_the_reference_is_causal() -> None:
    """What the tests rest on: logits of a prefix are those of the whole."""
    model, ids = tiny_model("deepseek_v4"), tokens(COUNT)
    want = eager(model, ids)
    for length in (1, 4, 7, 8, 31, 69):
        assert difference(eager(model, ids[:length]), want[:length]) < TOLERANCE


# --- the graph, with its state -------------------------------------------------------------------


def test_steps_and_every_split() -> None:
    """Step by step; and after every number of steps the rest in one chunk."""
    found, ids = imported("deepseek_v4"), tokens(41)
    want = eager(tiny_model("deepseek_v4"), ids)
    env, steps = Env(), []
    for i, one in enumerate(ids):
        if i:
            rest = feed(found, copy.deepcopy(env), ids[i:], i)
            assert difference(rest, want[i:]) < TOLERANCE, i
        steps.append(feed(found, env, [one], i))
    assert difference(np.concatenate(steps), want) < TOLERANCE


def test_going_back_and_on_with_other_tokens() -> None:
    found, ids, other = imported("deepseek_v4"), tokens(41), tokens(41, seed=1)
    model = tiny_model("deepseek_v4")
    for keep in (1, 4, 7, 15, 16, 23, 40):
        env = Env()
        feed(found, env, ids, 0)
        mixed = ids[:keep] + other[: 41 - keep]
        assert difference(feed(found, env, mixed[keep:], keep), eager(model, mixed)[keep:]) < (
            TOLERANCE
        ), keep


# --- the choice of rows --------------------------------------------------------------------------


@pytest.fixture
def lowest_first() -> Iterator[None]:
    """torch.topk, which breaks ties as it likes, takes the lowest index among equal values."""

    def topk(x: torch.Tensor, k: int, dim: int = -1, **how: Any) -> Any:
        values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", topk)
        yield


def steps_of(found: Imported, ids: list[int]) -> np.ndarray:
    env = Env()
    return np.concatenate([feed(found, env, [one], i) for i, one in enumerate(ids)])


@pytest.mark.usefixtures("lowest_first")
def test_among_equal_scores_the_lowest_row_wins() -> None:
    """Two index heads: a quarter of all scores is exactly zero."""
    model, ids = one_layer("sparse", index_topk=3), tokens(COUNT)
    want = eager(model, ids)
    found = import_model(model)
    assert difference(ours(definition(model), ids), want) < TOLERANCE
    assert difference(feed(found, Env(), ids, 0), want) < TOLERANCE
    assert difference(steps_of(found, ids), want) < TOLERANCE


def test_distinct_scores_need_no_rule() -> None:
    """With sixteen index heads no score is zero, and transformers as it is must agree."""
    model, ids = one_layer("sparse", index_topk=3, index_n_heads=16), tokens(COUNT)
    want = eager(model, ids)
    assert difference(ours(definition(model), ids), want) < TOLERANCE
    everything = eager(one_layer("sparse", index_n_heads=16), ids)
    assert difference(everything, want) > 1e-3  # the choice matters


# --- low precision -------------------------------------------------------------------------------

LOW = {"head_dim": 72, "partial_rotary_factor": 1 / 9, "index_head_dim": 32}


@cache
def rounding_import(kind: str, low: bool) -> Imported:
    return import_model(one_layer(kind, **LOW), options=DefinitionOptions(low_precision=low))


def state_after(low: bool, kind: str, ids: list[int]) -> tuple[Env, np.ndarray]:
    env = Env()
    return env, feed(rounding_import(kind, low), env, ids, 0)


def test_caches_are_rounded_by_the_formulas() -> None:
    """One layer, whose rows don't depend on the rounding: rounded rows are the rounded ones."""
    ids = tokens(23)
    plain, logits = state_after(False, "sparse", ids)
    low, low_logits = state_after(True, "sparse", ids)
    rows = plain.kv[0][0]
    rounded = np.concatenate([round_trip(rows[:, :64], "e4m3", 64), rows[:, 64:]], 1)
    np.testing.assert_array_equal(low.kv[0][0], rounded.astype(np.float16).astype(np.float32))
    for stream, how in (("kv", "e4m3"), ("index", "e2m1")):
        before, after = plain.windows[0, stream].rows, low.windows[0, stream].rows
        assert len(before) == len(after) == 5
        for number, row in before.items():
            np.testing.assert_array_equal(after[number], round_row(row, how, 8))
    # E4M3 keeps 3 bits: a few per cent, and not nothing.
    assert 1e-3 < difference(low_logits, logits) < 0.2


def test_index_queries_are_rounded() -> None:
    graph = rounding_import("sparse", True).graph
    (index,) = [n for n in graph if n.op == "index_topk"]
    trip = index.inputs[0].node
    assert trip.op == "round_trip"
    assert (trip.attrs["format"], trip.attrs["block"]) == ("e2m1", 32)
    assert (trip.attrs["begin"], trip.attrs["end"]) == (0, 32)
    assert trip.inputs[0].op == "hadamard"
    assert trip.inputs[0].node.inputs[0].op == "rope"


def test_the_reference_has_the_same_steps() -> None:
    """PyTorch's own answer for a rounded model is that of the definition."""
    found = rounding_import("sparse", True)
    ids = tokens(20)
    # A last bit more or less before a rounding is a step of 2^-4 after it, in single elements.
    want = reference_logits(found)
    assert difference(feed(found, Env(), ids, 0), want(ids)) < 5e-3
    for count in (1, 3, 4):  # up to the first compressed row
        assert difference(feed(found, Env(), ids[:count], 0), want(ids[:count])) < 5e-3, count


# --- steering ------------------------------------------------------------------------------------


def projected(model: Any, directions: np.ndarray, scales: tuple[float, float], ids: list[int]):
    """transformers' logits with hooks that steer each layer's two modules."""
    hooks = []
    for layer, direction in zip(model.model.layers, torch.from_numpy(directions), strict=True):
        for module, scale in ((layer.self_attn, scales[0]), (layer.mlp, scales[1])):

            def hook(_m: Any, _i: Any, out: Any, d: Any = direction, s: float = scale) -> Any:
                y = out[0] if isinstance(out, tuple) else out
                y = y - s * (y @ d)[..., None] * d
                return (y, *out[1:]) if isinstance(out, tuple) else y

            hooks.append(module.register_forward_hook(hook))
    try:
        return eager(model, ids)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", ["deepseek_v4", "llama"])
def test_steering(name: str) -> None:
    model = one_layer("heavy") if name == "deepseek_v4" else tiny_model(name)
    ids = tokens(19)
    found = import_model(model, options=DefinitionOptions(steering=True))
    layers, hidden = model.config.num_hidden_layers, model.config.hidden_size
    plain = eager(model, ids)
    assert difference(feed(found, Env(), ids, 0), plain) < TOLERANCE  # nothing is set
    draw = np.random.default_rng(0).standard_normal((layers, hidden)).astype(np.float32)
    directions = draw / np.linalg.norm(draw, axis=1, keepdims=True)
    for scales in ((1.0, 0.0), (0.0, 1.0), (0.5, -2.0)):
        want = projected(model, directions, scales, ids)
        assert difference(want, plain) > 1e-3
        states = {DIRECTIONS: directions, SCALES: np.array(scales, np.float32)}
        got = feed(found, Env(states=states), ids, 0)
        assert difference(got, want) < 2 * TOLERANCE, scales


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "low", "what"),
    [
        ({"scoring_func": "softmax"}, False, "scoring_func 'softmax'"),
        ({"attention_bias": True}, False, "biases"),
        ({"hidden_act": "gelu"}, False, "hidden_act"),
        ({}, True, "blocks of 64"),
        ({"head_dim": 72, "partial_rotary_factor": 1 / 9}, True, "index heads of 16"),
    ],
    ids=str,
)
def test_configs_that_are_refused(over: dict[str, Any], low: bool, what: str) -> None:
    config = tiny_config("deepseek_v4", **over)
    with torch.device("meta"), pytest.raises(UnsupportedError, match=what):
        define(config, DefinitionOptions(low_precision=low))


def test_options_that_a_model_does_not_have() -> None:
    with pytest.raises(UsageError, match="llama has no low-precision steps"):
        import_model(tiny_model("llama"), options=DefinitionOptions(low_precision=True))
    with pytest.raises(UsageError, match="--steering: Linear"):
        import_model(torch.nn.Linear(2, 2), options=DefinitionOptions(steering=True))


def test_a_table_that_names_no_expert_is_refused() -> None:
    model = copy.deepcopy(one_layer("window", "hash"))
    table = model.model.layers[0].mlp.gate.tid2eid
    table[5, 1], table[6, 0], table[7, 2] = -1, 8, 1 << 40
    with pytest.raises(CheckpointError, match=r"tid2eid holds 3 numbers that are none from 0 to 7"):
        import_model(model)
