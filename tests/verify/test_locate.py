"""Looking for the first difference: the search itself, and a broken pass and kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from bessemer.codegen import group
from bessemer.codegen.emit import Fn
from bessemer.codegen.group import CodegenTarget, GroupSpec
from bessemer.graph import Dim, DType, Graph, Node, TensorType, Value, constant, emit, param
from bessemer.passes import pipeline
from bessemer.passes.base import RulePass, Uses
from bessemer.verify import Report, verify
from bessemer.verify.locate import Probe, bisect, first_wrong, probes
from bessemer.verify.rebuild import cut
from tests.tiny_models import tiny
from tests.verify.support import OPTIONS


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_bisect_finds_the_first_wrong_one(count: int) -> None:
    for first in range(count):
        asked: list[int] = []

        def wrong(i: int, first: int = first, asked: list[int] = asked) -> bool:
            asked.append(i)
            return i >= first

        assert bisect(count, wrong) == first
        assert len(asked) <= np.ceil(np.log2(count)) + 1


def residual_graph() -> Graph:
    """Two layers x + f(x), with a branch in each that does not reach all of it."""
    rows = Dim.sym("T")
    ids = emit("input", name="ids", dtype=DType.I64, shape=(rows,))
    positions = emit("input", name="positions", dtype=DType.I64, shape=(rows,))
    angle = emit("reshape", emit("cast", positions, dtype=DType.F32), shape=(rows, 1))
    x = emit("embedding", param("e", TensorType(DType.F32, (9, 4))), ids)
    for _ in range(2):
        gate = emit("mul", emit("sin", x), emit("cos", angle))
        x = emit("add", x, gate)
    return Graph("g", {"logits": x})


def test_bottlenecks_are_the_residual_stream() -> None:
    found = probes(residual_graph())
    assert [p.value.op for p in found] == ["embedding", "sin", "mul", "add", "sin", "mul", "add"]
    assert [p.is_bottleneck for p in found] == [True, False, False, True, False, False, True]


def test_first_wrong_looks_between_bottlenecks_one_by_one() -> None:
    found = probes(residual_graph())
    # The second layer's sin is wrong; its mul happens to be right; the sum is wrong.
    wrong = {4, 6}
    assert first_wrong(found, wrong.__contains__) == 4
    assert first_wrong(found, {6}.__contains__) == 6
    assert first_wrong(found, set(range(7)).__contains__) == 0
    assert first_wrong([Probe(found[0].value, False)], lambda i: True) == 0


def test_a_cut_graph_gives_rows_of_one_axis() -> None:
    rows = Dim.sym("T")
    x = emit("input", name="x", dtype=DType.F32, shape=(rows, 2, 3))
    graph = cut(Graph("g", {"logits": x}), emit("exp", x))
    assert graph.outputs["logits"].shape == (rows, 6)


# --- on compiled models ---------------------------------------------------------------------------

# An epsilon that changes every norm.
WRONG_EPS = 0.5


@dataclass(frozen=True)
class WrongNorm(RulePass):
    """A pass with a bug: it changes one norm of the second layer."""

    name = "wrong_norm"

    def rule(self, node: Node, uses: Uses) -> Value | None:
        weight = str(node.inputs[1].node.attrs.get("name")) if len(node.inputs) > 1 else ""
        if node.op == "rms_norm" and weight.endswith("layers.1.post_attention_layernorm.weight"):
            return emit("rms_norm", *node.inputs, eps=WRONG_EPS, loc=node.loc)
        return None


@pytest.fixture
def wrong_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    merge = (*pipeline.PHASES["merge"], WrongNorm())
    monkeypatch.setitem(pipeline.PHASES, "merge", merge)


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    right = group.KERNELS["rms_norm"]

    def wrong(fn: Fn, spec: GroupSpec, target: CodegenTarget) -> None:
        attrs = tuple((k, WRONG_EPS if k == "eps" else v) for k, v in spec.attrs)
        right.emit(fn, replace(spec, attrs=attrs), target)

    monkeypatch.setitem(group.KERNELS, "rms_norm", replace(right, emit=wrong))


def failed_stages() -> tuple[Report, dict[str, str]]:
    _, model = tiny("llama", num_hidden_layers=2)
    report = verify(model, lengths=(3,), decode_steps=0, threads=1, options=OPTIONS)
    stages = {c.name: c.detail for c in report.checks if c.layer == "stages" and not c.ok}
    return report, stages


@pytest.mark.usefixtures("wrong_pass")
def test_a_wrong_pass_is_named() -> None:
    report, stages = failed_stages()
    assert not report.ok
    assert list(stages) == ["lowered prefill", "first difference"]
    assert stages["first difference"].startswith("pass wrong_norm (merge)")


@pytest.mark.usefixtures("wrong_kernel")
def test_a_wrong_kernel_is_named_with_its_place_in_the_model() -> None:
    report, stages = failed_stages()
    assert not report.ok
    found = stages["first difference"]
    assert found.startswith("compiled code")
    assert "rms_norm of model.layers.0.input_layernorm" in found
    assert "embedding before it is right" in found


def test_a_constant_is_not_a_probe() -> None:
    graph = Graph("g", {"logits": constant(np.zeros((2, 3), np.float32))})
    assert probes(graph) == []
