"""How each hot op becomes calls of scheduled kernels."""

from __future__ import annotations

from typing import Any

from bessemer.artifact.layout import PANEL_ROWS, Q8_DEPTH
from bessemer.codegen import hot_compressed
from bessemer.codegen.kernels import attention_decode, integer_rows, linear_parts
from bessemer.codegen.kernels.tile import tile_shape
from bessemer.codegen.program import EXPANDERS, Planner, expands
from bessemer.codegen.views import View
from bessemer.graph.core import Node, Value
from bessemer.graph.dims import Dim, product

# The rows whose logits are wanted: mostly one, whatever the length of the prompt.
WANTED_ROWS = Dim.sym("R")
# Ops whose weights are stored in panels, with the index of the weight operand.
PANEL_OPERAND = {"linear": 1, "glu_linear": 1, "embedding": 0, "expert_linear": 2}


def is_hot(node: Node) -> bool:
    """Whether a scheduled kernel takes the node. Others get the generic lowering."""
    if node.op not in EXPANDERS:
        return False
    if node.op in PANEL_OPERAND and node.inputs[PANEL_OPERAND[node.op]].op != "param":
        return False
    rows = node.types[0].shape[0]
    if any(isinstance(s, Dim) for v in node.inputs for s in v.shape[1:]):
        return False
    if node.op in hot_compressed.ROW_BY_ROW:
        return hot_compressed.is_hot(node)
    if node.op in ("linear", "glu_linear"):
        return node.inputs[0].type.rank == 2
    if node.op in ("rms_norm", "layer_norm"):
        return node.inputs[0].type.rank in (2, 3) and (isinstance(rows, Dim) or rows == 1)
    if node.op == "select_rows":
        return node.inputs[0].type.rank == 2 and node.attrs["axis"] == -2
    if node.op == "embedding":
        return node.inputs[1].type.rank == 1
    return True


def is_stateful(node: Node) -> bool:
    """What is a group of its own in a generic schedule, too: it reads and writes the KV cache."""
    return node.op in ("flash_attention", "gqa_decode_attention", *hot_compressed.STATEFUL)


def _label(node: Node) -> str:
    return node.loc.split(" ")[0] or node.op


def _attrs(node: Node, *names: str) -> dict[str, Any]:
    return {name: node.attrs[name] for name in names}


def _inputs(planner: Planner, values: tuple[Value, ...], panel: int | None = None) -> list:
    return [
        (planner.read(v), "weight" if i == panel or v.op == "param" else "in")
        for i, v in enumerate(values)
    ]


@expands("linear", "glu_linear")
def _linear(planner: Planner, node: Node) -> None:
    gated = node.op == "glu_linear"
    names = ("activation", "alpha", "limit") if gated else ("activation", "scale")
    rows = node.types[0].shape[0]
    attrs = {
        **_attrs(node, *names),
        "has_bias": node.attrs["has_bias"],
        "has_residual": node.attrs.get("has_residual", False),
        "few_rows": rows == WANTED_ROWS,
    }
    accesses = [*_inputs(planner, node.inputs, 1), (planner.write(node.out), "out")]
    quantised = _is_quantised(planner, node.inputs[1])
    if quantised and isinstance(rows, Dim):
        accesses[:1] = _integer_rows(planner, node)
    if rows == 1 and not quantised and not gated:
        panels, depth = accesses[1][0].buffer.shape[-3:-1]
        parts = linear_parts.depth_parts(int(str(panels)), int(str(depth)))
        if parts > 1:
            _linear_by_parts(planner, node, accesses, parts, attrs)
            return
    planner.call(node.op, accesses, label=_label(node), attrs=attrs)


def _linear_by_parts(
    planner: Planner,
    node: Node,
    accesses: list[tuple[View, str]],
    parts: int,
    attrs: dict[str, Any],
) -> None:
    """One row by a few deep panels, cut along the depth."""
    (x, w, *rest), panels = accesses, accesses[1][0].buffer.shape[-3]
    assert isinstance(panels, int)
    partials = planner.temporary("partials", (panels * parts, PANEL_ROWS))
    cut = {**attrs, "parts": parts}
    planner.call(
        "linear_parts",
        [x, w, (partials, "out")],
        label=_label(node),
        attrs={"parts": parts},
        rows=1,
    )
    planner.call("linear_combine", [(partials, "in"), *rest], label=_label(node), attrs=cut, rows=1)


def _is_quantised(planner: Planner, weight: Value) -> bool:
    return planner.read(weight).buffer.element == "q8_0"


def _integer_rows(planner: Planner, node: Node) -> list[tuple[View, str]]:
    """x of a product with quantised weights as 16-bit integers and their scales: memory for the
    rows in groups of the register tile's rows, of which the last may be filled in part.
    """
    x = node.inputs[0]
    rows, *inner, depth = x.shape
    assert isinstance(depth, int)
    count, group = integer_rows.blocks(depth), 1
    if isinstance(rows, Dim):
        group = tile_shape(planner.target).rows
    each = product(tuple(inner))
    q = planner.temporary("integers", (rows + (group - 1), each * count * Q8_DEPTH), "i16")
    scales = planner.temporary("scales", (rows + (group - 1), each * count))
    planner.call(
        "quantise_rows",
        [(planner.read(x), "in"), (q, "out"), (scales, "out")],
        label=_label(node),
        attrs={"group": group},
        rows=rows,
    )
    return [(q, "in"), (scales, "in")]


@expands("rms_norm", "layer_norm")
def _norm(planner: Planner, node: Node) -> None:
    accesses = [*_inputs(planner, node.inputs), (planner.write(node.out), "out")]
    planner.call(node.op, accesses, label=_label(node), attrs=_attrs(node, "eps"))


@expands("embedding")
def _embedding(planner: Planner, node: Node) -> None:
    accesses = [*_inputs(planner, node.inputs, 0), (planner.write(node.out), "out")]
    planner.call("embedding", accesses, label=_label(node))


@expands("rope")
def _rope(planner: Planner, node: Node) -> None:
    accesses = [*_inputs(planner, node.inputs), (planner.write(node.out), "out")]
    planner.call("rope", accesses, label=_label(node), attrs=_attrs(node, "style", "offset"))


@expands("select_rows")
def _select_rows(planner: Planner, node: Node) -> None:
    accesses = [*_inputs(planner, node.inputs), (planner.write(node.out), "out")]
    planner.call("select_rows", accesses, label=_label(node))


def _attention_parts(planner: Planner, node: Node) -> tuple[dict[str, Any], dict[str, int], View]:
    q, k, v = (x.shape for x in node.inputs[:3])
    attrs = {
        "kv_heads": k[-2],
        "key_width": k[-1],
        "value_width": v[-1],
        **_attrs(node, "scale", "softcap", "has_sinks"),
    }
    layer, window = node.attrs["layer"], node.attrs["window"]
    assert isinstance(layer, int)
    assert isinstance(window, int)
    literals = {"entry": planner.entry(layer), "window": window}
    return attrs, literals, planner.input("slots", q[0])


def _kv_update(planner: Planner, node: Node, entry: int, slots: View) -> str:
    """Appends the rows' keys and values to the layer's cache; gives the resource's name."""
    resource = f"kv[{entry}]"
    _, k, v, positions = (planner.read(x) for x in node.inputs[:4])
    planner.call(
        "generic_kv_update" if planner.plain_attention else "kv_update",
        [(k, "in"), (v, "in"), (positions, "in"), (slots, "in"), (planner.state_memory(), "state")],
        label=_label(node),
        literals={"entry": entry},
        resources=((resource, True),),
        rows=node.types[0].shape[0],
    )
    return resource


@expands("flash_attention")
def _flash_attention(planner: Planner, node: Node) -> None:
    attrs, literals, slots = _attention_parts(planner, node)
    resource = _kv_update(planner, node, literals["entry"], slots)
    q, positions = planner.read(node.inputs[0]), planner.read(node.inputs[3])
    accesses = [(q, "in"), (positions, "in"), (slots, "in"), (planner.state_memory(), "state")]
    accesses += [(planner.read(x), "weight") for x in node.inputs[4:]]
    accesses.append((planner.write(node.out), "out"))
    planner.call(
        "generic_attention" if planner.plain_attention else "flash_attention",
        accesses,
        label=_label(node),
        attrs=attrs,
        literals=literals,
        resources=((resource, False),),
    )


@expands("gqa_decode_attention")
def _decode_attention(planner: Planner, node: Node) -> None:
    if planner.plain_attention:
        _flash_attention(planner, node)
        return
    attrs, literals, slots = _attention_parts(planner, node)
    resource = _kv_update(planner, node, literals["entry"], slots)
    q, positions = planner.read(node.inputs[0]), planner.read(node.inputs[3])
    heads = node.inputs[0].shape[-2]
    assert isinstance(heads, int)
    shape = attention_decode.partial_shape(heads, attrs["kv_heads"], attrs["value_width"])
    partials = planner.temporary("partials", shape)
    split_attrs = {**attrs, "heads": heads}
    planner.call(
        "decode_attention",
        [
            (q, "in"),
            (positions, "in"),
            (slots, "in"),
            (planner.state_memory(), "state"),
            (partials, "out"),
        ],
        label=_label(node),
        attrs=split_attrs,
        literals=literals,
        resources=((resource, False),),
        rows=1,
    )
    sinks = [(planner.read(x), "weight") for x in node.inputs[4:]]
    planner.call(
        "decode_combine",
        [(partials, "in"), *sinks, (planner.write(node.out), "out")],
        label=_label(node),
        attrs=split_attrs,
    )


@expands("expert_linear")
def _expert_linear(planner: Planner, node: Node) -> None:
    attrs = _attrs(node, "activation", "alpha", "limit", "gated", "has_bias")
    accesses = [*_inputs(planner, node.inputs, 2), (planner.write(node.out), "out")]
    if _is_quantised(planner, node.inputs[2]):
        accesses[:1] = _integer_rows(planner, node)
    planner.call("expert_linear", accesses, label=_label(node), attrs=attrs)
