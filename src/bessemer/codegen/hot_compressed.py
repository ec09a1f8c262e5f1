"""How compressed attention, hyper-connections and low-precision steps become calls of kernels."""

from __future__ import annotations

from bessemer.codegen.program import Planner, expands
from bessemer.codegen.views import View
from bessemer.graph.core import Node, Value
from bessemer.graph.dims import Dim

# Ops that read and write the session's state: groups of their own in every schedule.
STATEFUL = ("block_compress", "index_topk", "compressed_attention")
# Ops on each row by itself.
ROW_BY_ROW = ("sinkhorn", "collapse_streams", "mix_streams", "round_trip", "hadamard")
# A matrix of a stream's mixing weights stays in registers up to this size.
MOST_STREAMS = 16


def is_hot(node: Node) -> bool:
    """Whether a kernel takes this node, which is one of ROW_BY_ROW."""
    x = node.inputs[0]
    rows = x.shape[0]
    if not isinstance(rows, Dim) and rows != 1:
        return False
    if node.op == "sinkhorn":
        return x.type.rank == 3 and int(str(x.shape[-1])) <= MOST_STREAMS
    if node.op in ("collapse_streams", "mix_streams"):
        return x.type.rank == 3
    return x.type.rank in (2, 3)


def _access(planner: Planner, value: Value) -> tuple[View, str]:
    return planner.read(value), "weight" if value.op == "param" else "in"


def _label(node: Node) -> str:
    return node.loc.split(" ")[0] or node.op


def _layer(node: Node) -> int:
    layer = node.attrs["layer"]
    assert isinstance(layer, int)
    return layer


@expands(*ROW_BY_ROW)
def _row_by_row(planner: Planner, node: Node) -> None:
    accesses = [_access(planner, v) for v in node.inputs]
    accesses.append((planner.write(node.out), "out"))
    planner.call(node.op, accesses, label=_label(node), attrs=node.attrs)


@expands("block_compress")
def _block_compress(planner: Planner, node: Node) -> None:
    kv, gate, *tables, positions = node.inputs
    stream = str(node.attrs["stream"])
    entry = planner.entry(_layer(node), stream)
    slots, state = planner.input("slots", kv.shape[0]), planner.state_memory()
    shared = [_access(planner, positions), (slots, "in"), (state, "state")]
    planner.call(
        "pending_update",
        [_access(planner, kv), _access(planner, gate), *shared],
        label=_label(node),
        literals={"entry": entry},
        resources=((f"pending[{entry}]", True),),
        rows=kv.shape[0],
    )
    planner.call(
        "generic_block_pool" if planner.plain_attention else "block_pool",
        [*(_access(planner, v) for v in tables), *shared, (planner.write(node.out), "out")],
        label=_label(node),
        attrs={name: node.attrs[name] for name in ("stream", "overlap", "eps", "round")},
        literals={"entry": entry},
        resources=((f"pending[{entry}]", False), (f"compressed[{entry}]", True)),
    )


@expands("index_topk")
def _index_topk(planner: Planner, node: Node) -> None:
    q, _, visible = node.inputs
    rows, k = q.shape[0], node.attrs["k"]
    entry = planner.entry(_layer(node), "index")
    kept = planner.compressed_rows(entry)
    slots = planner.input("slots", rows)
    accesses = [_access(planner, v) for v in node.inputs]
    accesses += [(slots, "in"), (planner.state_memory(), "state")]
    attrs = {"scale": node.attrs["scale"], "rows": kept, "k": k}
    resources = ((f"compressed[{entry}]", False),)
    if planner.plain_attention or rows != 1:
        planner.call(
            "generic_index_topk" if planner.plain_attention else "index_topk",
            [*accesses, (planner.write(node.out), "out")],
            label=_label(node),
            attrs=attrs,
            literals={"entry": entry},
            resources=resources,
        )
        return
    keys = planner.temporary("keys", (kept,), "i32")
    planner.call(
        "index_scores",
        [*accesses, (keys, "out")],
        label=_label(node),
        attrs=attrs,
        literals={"entry": entry},
        resources=resources,
        rows=1,
    )
    planner.call(
        "index_select",
        [(keys, "in"), _access(planner, visible), (planner.write(node.out), "out")],
        label=_label(node),
    )


@expands("compressed_attention")
def _compressed_attention(planner: Planner, node: Node) -> None:
    q, kv, positions, *optional = node.inputs
    layer, rows, window = _layer(node), q.shape[0], node.attrs["window"]
    assert isinstance(window, int)
    entry = planner.entry(layer)
    slots, state = planner.input("slots", rows), planner.state_memory()
    shared = [_access(planner, positions), (slots, "in"), (state, "state")]
    planner.call(
        "row_update",
        [_access(planner, kv), *shared],
        label=_label(node),
        literals={"entry": entry},
        resources=((f"window[{entry}]", True),),
        rows=rows,
    )
    literals = {"entry": entry, "window": window}
    resources = [(f"window[{entry}]", False)]
    if node.attrs["has_visible"]:
        literals["older"] = planner.entry(layer, "kv")
        resources.append((f"compressed[{literals['older']}]", False))
    kind = "compressed_attention"
    if planner.plain_attention:
        kind = "generic_compressed_attention"
    elif rows == 1:
        kind = "decode_compressed_attention"
    names = ("scale", "has_sinks", "has_visible", "has_indices")
    planner.call(
        kind,
        [
            _access(planner, q),
            *shared,
            *(_access(planner, v) for v in optional),
            (planner.write(node.out), "out"),
        ],
        label=_label(node),
        attrs={name: node.attrs[name] for name in names},
        literals=literals,
        resources=tuple(resources),
        rows=rows,
    )
