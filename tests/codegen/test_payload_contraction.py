"""Matrix products, linear layers and experts by the generic lowering, on weights as stored."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.graph.core import Value
from bessemer.graph.schema import emit
from tests.codegen.payload_harness import Case, Library, Stored, T, index, tensor, weight

STORAGES = [Stored(d, layout) for d in ("f32", "f16", "bf16") for layout in ("plain", "panels")]
N, K, EXPERTS = 37, 19, 5  # no multiple of a panel or of a vector
GATED = {"gated": True, "activation": "silu"}


def _linears() -> list[Case]:
    cases = []
    x, w, b = tensor("x", T, K), weight("w", N, K), weight("b", N)
    residual = tensor("r", T, N)
    stacked, bias2 = weight("w", 2, N, K), weight("b", 2, N)
    for s in STORAGES:
        tag = f"{s.dtype}_{s.layout}"
        whole = {"activation": "gelu", "scale": 0.5, "has_bias": True, "has_residual": True}
        cases += [
            Case(f"linear_{tag}", [emit("linear", x, w)], {"w": s}, both=False),
            Case(
                f"epilogue_{tag}",
                [emit("linear", x, w, b, residual, **whole)],
                {"w": s},
                both=False,
            ),
            Case(f"glu_{tag}", [emit("glu_linear", x, stacked)], {"w": s}, both=False),
        ]
    panels = {"w": Stored("f16", "panels"), "b": Stored("f16")}
    clamped = {"activation": "swiglu_clamped", "has_bias": True}
    return [
        *cases,
        Case("even_panels", [emit("linear", x, weight("w", 64, K))], panels),
        Case("glu_bias", [emit("glu_linear", x, stacked, bias2, has_bias=True)], panels),
        Case("glu_clamped", [emit("glu_linear", x, stacked, bias2, **clamped)], panels),
        Case("deep", [emit("linear", tensor("x", T, 2, K), w, activation="relu")], panels),
        Case("norm_then", [emit("linear", emit("rms_norm", x, eps=1e-5), w)], panels),
        Case("then_view", [_heads(emit("linear", x, weight("w", 36, K)))], panels),
        Case("slice_of_linear", [emit("slice", emit("linear", x, w), axis=-1, start=3, stop=30)]),
    ]


def _heads(x: Value) -> Value:
    return emit("softmax", emit("reshape", x, shape=(T, 4, 9)))


def _matmuls() -> list[Case]:
    x = tensor("x", T, K)
    q, k = tensor("q", T, 3, 5, 8), tensor("k", T, 3, 7, 8)
    return [
        Case("matmul", [emit("matmul", x, tensor("b", K, 11))]),
        Case("matmul_t", [emit("matmul", x, tensor("b", 11, K), transpose_b=True)]),
        Case("batched", [emit("matmul", q, emit("permute", k, perm=(0, 1, 3, 2)))]),
        Case("batched_t", [emit("matmul", q, k, transpose_b=True)]),
        Case("left_is_whole", [emit("matmul", tensor("a", 1, 4, 5), q)]),
        Case("broadcast", [emit("matmul", q, tensor("b", 1, 8, 2))]),
        Case("computed", [emit("matmul", emit("exp", x), emit("tanh", tensor("b", K, 3)))]),
        Case("gram", [emit("matmul", x, x, transpose_b=True)]),
        Case("over_rows", [emit("matmul", emit("permute", x, perm=(1, 0)), x)]),
        Case("attention", [_attention()]),
        Case("int", [emit("matmul", index("a", T, 4), index("b", 4, 3))]),
    ]


def _attention() -> Value:
    """Plain attention over the rows of a call, spelt out."""
    q, k, v = (emit("permute", tensor(n, T, 2, 8), perm=(1, 0, 2)) for n in "qkv")
    scores = emit("softmax", emit("matmul", q, k, transpose_b=True))
    return emit("permute", emit("matmul", scores, v), perm=(1, 0, 2))


def _experts() -> list[Case]:
    x, each = tensor("x", T, K), tensor("x", T, 2, K)
    chosen, scores = index("chosen", T, 2), tensor("scores", T, 2)
    w, gate_up = weight("w", EXPERTS, N, K), weight("w", EXPERTS, 2, N, K)
    b, b2 = weight("b", EXPERTS, N), weight("b", EXPERTS, 2, N)
    cases = []
    for s in (Stored(), Stored("f16", "panels"), Stored("bf16", "panels")):
        tag = f"{s.dtype}_{s.layout}"
        cases += [
            Case(f"expert_{tag}", [emit("expert_linear", x, chosen, w)], {"w": s}),
            Case(f"expert_each_{tag}", [emit("expert_linear", each, chosen, w)], {"w": s}),
            Case(f"expert_gated_{tag}", [emit("expert_linear", x, chosen, gate_up, **GATED)],
                 {"w": s}),
        ]  # fmt: skip
    full = [x, chosen, scores, gate_up, weight("down", EXPERTS, K, N)]
    biased = [*full, b2, weight("b_down", EXPERTS, K)]
    flags = {"has_gate_up_bias": True, "has_down_bias": True, "activation": "swiglu_clamped"}
    return [
        *cases,
        Case("expert_bias", [emit("expert_linear", x, chosen, w, b, has_bias=True)]),
        Case("expert_gated_bias", [emit("expert_linear", each, chosen, gate_up, b2, **GATED,
                                        has_bias=True)]),
        Case("moe", [emit("moe", *full)], {"w": Stored("f16", "panels")}),
        Case("moe_bias", [emit("moe", *biased, **flags)]),
    ]  # fmt: skip


CASES = _linears() + _matmuls() + _experts()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(CASES, tmp_path_factory.mktemp("contraction"))


def _data(case: Case, rows: int) -> dict[str, np.ndarray]:
    data = case.data(rows, seed=rows)
    if "chosen" in data:
        rng = np.random.default_rng(rows)
        data["chosen"] = rng.integers(0, EXPERTS - 1, data["chosen"].shape)  # the last never
    return data


@pytest.mark.parametrize("name", [c.name for c in CASES])
def test_random_values(library: Library, name: str) -> None:
    for rows in (1, 2, 5, 33):
        library.check(name, rows, _data(library.cases[name], rows), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("storage", STORAGES)
def test_small_integers_have_the_same_bits(library: Library, storage: Stored) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, (5, K)).astype(np.float32)
    w = rng.integers(-8, 9, (N, K)).astype(np.float32)
    name = f"linear_{storage.dtype}_{storage.layout}"
    library.check(name, 5, {"x": x, "w": w}, exact=True)


def test_experts_that_nobody_chose_are_not_read(library: Library) -> None:
    for name in ("expert_f16_panels", "expert_gated_f32_plain", "moe"):
        data = _data(library.cases[name], 7)
        data["w"][-1] = np.nan
        library.check(name, 7, data, rtol=2e-5, atol=2e-5)


def test_rows_are_split_where_the_weights_are_whole(library: Library) -> None:
    for name in ("linear_f32_plain", "matmul", "batched", "moe", "expert_f32_plain", "deep"):
        assert library.cases[name].splits, name
    for name in ("gram", "over_rows", "attention"):
        assert not library.cases[name].splits, name
