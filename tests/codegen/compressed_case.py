"""A layer with compressed rows: its state memory, its kernels, and the graph's references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import bessemer.codegen.kernels
import bessemer.codegen.payload  # noqa: F401
from bessemer.artifact.layout import CompressedStream, SharedLayer, StateLayout
from bessemer.codegen.group import ROWS, GroupSpec, Operand
from bessemer.graph.ops.compressed import _block_compress, _compressed_attention, _index_topk
from bessemer.graph.schema import Env
from tests.codegen.kernel_harness import CompiledKernel, aligned, codegen_target, row_operand

STATE = Operand("i8", (ROWS,), role="state")
NUMBERS = Operand("i64", (ROWS,))


def f32(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


class CompressedLayer:
    """Feeds token rows to the kernels of one layer and to NumPy, side by side."""

    def __init__(
        self,
        *,
        width: int = 32,
        window: int = 8,
        rate: int = 4,
        overlap: bool = True,
        rotary: int = 8,
        index_width: int = 16,
        rounds: Mapping[str, str] | None = None,
        lanes: int = 8,
        kv: str = "f32",
        chunk: int = 16,
        capacity: int = 96,
        generic: bool = False,
        seed: int = 0,
    ) -> None:
        self.target = codegen_target(lanes, kv)
        self.rng = np.random.default_rng(seed)
        self.window, self.rate, self.overlap = window, rate, overlap
        self.rotary = rotary
        self.widths = {"kv": width, "index": index_width}
        self.rounds = rounds or {"kv": "none", "index": "none"}
        self.prefix = "generic_" if generic else ""
        self.env = Env()
        streams = tuple(CompressedStream(0, s, w, rate, overlap) for s, w in self.widths.items())
        shared = (SharedLayer(0, width, window),)
        self.layout = StateLayout((), kv, capacity, chunk, shared=shared, streams=streams)
        state = aligned(self.layout.nbytes)
        header = self.layout.header()
        state[: header.nbytes] = header.view(np.uint8)
        self.state = state.view(np.int8)
        factor = 2 if overlap else 1
        self.tables = {
            s: (f32(self.rng, rate, factor * w), f32(self.rng, w)) for s, w in self.widths.items()
        }

    def entry(self, stream: str = "") -> int:
        return ["", "kv", "index"].index(stream)

    def run(
        self, spec: GroupSpec, arrays: list[np.ndarray], numbers: list[int], threads: int
    ) -> None:
        rows = len(arrays[0]) if spec.operands[0].shape[0] == ROWS else len(arrays[2])
        CompiledKernel(spec, self.target)(rows, arrays, numbers, threads=threads, order="reversed")

    def compress(self, positions: np.ndarray, stream: str, threads: int = 1) -> np.ndarray:
        """Random projected rows at these positions; returns what is visible, checked."""
        bias, norm = self.tables[stream]
        rows, projected, width = len(positions), bias.shape[1], norm.shape[0]
        kv, gate = (f32(self.rng, rows, projected) for _ in range(2))
        angles = f32(self.rng, rows, self.rotary // 2)
        cos, sin = np.cos(angles), np.sin(angles)
        attrs = {
            "layer": 0,
            "stream": stream,
            "rate": self.rate,
            "overlap": self.overlap,
            "eps": 1e-6,
            "round": self.rounds[stream],
        }
        wanted = _block_compress(kv, gate, bias, norm, cos, sin, positions, attrs, self.env)
        slots = np.zeros(rows, np.int64)
        row = row_operand("f32", (projected,))
        entry = [self.entry(stream)]
        update = GroupSpec("pending_update", (row, row, NUMBERS, NUMBERS, STATE), ("entry",))
        self.run(update, [kv, gate, positions, slots, self.state], entry, threads)
        table = row_operand("f32", (self.rotary // 2,))
        weights = (Operand("f32", bias.shape, role="weight"), Operand("f32", (width,)))
        operands = (*weights, table, table, NUMBERS, NUMBERS, STATE, NUMBERS)
        kept = tuple((k, attrs[k]) for k in ("stream", "overlap", "eps", "round"))
        visible = np.full(rows, -7, np.int64)
        pool = GroupSpec(f"{self.prefix}block_pool", operands, ("entry",), kept)
        arrays = [bias, norm, cos, sin, positions, slots, self.state, visible]
        self.run(pool, arrays, entry, threads)
        assert np.array_equal(visible, wanted)
        return visible

    def compressed(self, stream: str) -> np.ndarray:
        """The compressed rows that the state holds, f32 [rows, width]."""
        words = self.layout.header()[8 + 4 * self.entry(stream) :][:4]
        at = self.layout.header_bytes + int(words[1])
        width, dtype = self.widths[stream], {"f32": np.float32, "f16": np.float16}
        kept = self.state[at:].view(dtype[self.target.kv_dtype])[: int(words[3]) * width]
        if stream == "index":
            kept = kept.reshape(-1, width, 32).swapaxes(1, 2)
        return kept.reshape(-1, width).astype(np.float32)

    def choose(
        self, visible: np.ndarray, k: int, heads: int, *, threads: int = 1, **given: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Chosen rows by the kernels and by NumPy."""
        rows, width = len(visible), self.widths["index"]
        q = given.get("q", f32(self.rng, rows, heads, width))
        weights = given.get("weights", f32(self.rng, rows, heads))
        attrs: dict[str, Any] = {"layer": 0, "k": k, "scale": 0.3}
        wanted = _index_topk(q, weights, visible, attrs, self.env)
        kept = self.layout.compressed_rows(self.layout.streams[1])
        one = rows == 1 and not self.prefix
        size = 1 if one else ROWS
        vector = Operand("i64", (size,))
        head = (
            *(Operand("f32", (size, heads, width)), Operand("f32", (size, heads))),
            *(vector, vector, STATE),
        )
        shared = (("scale", 0.3), ("rows", kept), ("k", k))
        out = np.full((rows, k), -7, np.int64)
        chosen = Operand("i64", (size, k))
        arrays = [q, weights, visible, np.zeros(rows, np.int64), self.state]
        entry = [self.entry("index")]
        if not one:
            spec = GroupSpec(f"{self.prefix}index_topk", (*head, chosen), ("entry",), shared)
            self.run(spec, [*arrays, out], entry, threads)
            return out, wanted
        keys, held = Operand("i32", (kept,)), np.full(kept, -7, np.int32)
        spec = GroupSpec("index_scores", (*head, keys), ("entry",), shared)
        self.run(spec, [*arrays, held], entry, threads)
        self.run(GroupSpec("index_select", (keys, vector, chosen)), [held, visible, out], [], 1)
        return out, wanted

    def attend(
        self,
        positions: np.ndarray,
        heads: int,
        *,
        threads: int = 1,
        sinks: np.ndarray | None = None,
        visible: np.ndarray | None = None,
        indices: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Attention of random rows by the kernels and by NumPy."""
        rows, width = len(positions), self.widths["kv"]
        q, kv = f32(self.rng, rows, heads, width), f32(self.rng, rows, width)
        slots = np.zeros(rows, np.int64)
        update = GroupSpec(
            "row_update", (row_operand("f32", (width,)), NUMBERS, NUMBERS, STATE), ("entry",)
        )
        self.run(update, [kv, positions, slots, self.state], [self.entry()], threads)
        optional = {"sinks": sinks, "visible": visible, "indices": indices}
        has = {f"has_{name}": array is not None for name, array in optional.items()}
        extra = [array for array in optional.values() if array is not None]
        attrs = {"layer": 0, "scale": 0.4, "window": self.window, **has}
        held = kv if self.target.kv_dtype == "f32" else kv.astype(np.float16).astype(np.float32)
        wanted = _compressed_attention(q, held, positions, *extra, attrs, self.env)
        one = rows == 1 and not self.prefix
        size = 1 if one else ROWS
        kind = "decode_compressed_attention" if one else f"{self.prefix}compressed_attention"
        matrix = Operand("f32", (size, heads, width))
        operands = [matrix, Operand("i64", (size,)), Operand("i64", (size,)), STATE]
        if sinks is not None:
            operands.append(Operand("f32", (heads,)))
        if visible is not None:
            operands.append(Operand("i64", (size,)))
        if indices is not None:
            operands.append(Operand("i64", (size, indices.shape[1])))
        literals = ["entry", "window"] + (["older"] if visible is not None else [])
        numbers = [self.entry(), self.window, self.entry("kv")][: len(literals)]
        kept = (("scale", 0.4), *has.items())
        spec = GroupSpec(kind, (*operands, matrix), tuple(literals), kept)
        out = np.full(q.shape, np.nan, np.float32)
        self.run(spec, [q, positions, slots, self.state, *extra, out], numbers, threads)
        return out, wanted
