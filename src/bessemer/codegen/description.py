"""The constants of a model as C: the table by which the C API of `native/` knows its model.

It is compiled into each library. `manifest.json` says the same to Python; both hold the ABI hash of
the layouts and the hash of the weight file's table, so that what doesn't belong together is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bessemer.artifact.layout import (
    HEADER_WORDS,
    KEY_BLOCK,
    LAYER_WORDS,
    STORAGE_BYTES,
    CompressedStream,
    Entry,
    KVLayer,
    SharedLayer,
    StateLayout,
)
from bessemer.artifact.manifest import ENTRY_POINTS, RopeSwitch
from bessemer.codegen.abi import header_hash
from bessemer.codegen.generate import Generated
from bessemer.steering import DIRECTIONS, SCALES

# Characters that stand for themselves in a C string; all others are written as octal escapes.
_PLAIN = frozenset(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789 !#$&'()*+,-./:;<=>@[]^_{|}~"
)
_ROPE = {"longrope": "BSM_ROPE_LONGROPE", "dynamic": "BSM_ROPE_DYNAMIC"}


@dataclass(frozen=True)
class Variant:
    """Code for one level of processor features. features: as /proc/cpuinfo names them.
    prefix: what the names of its entry points begin with.
    """

    features: tuple[str, ...]
    prefix: str = ""


@dataclass(frozen=True)
class WeightFile:
    """What weights.bin must be. digest: of its tensor table, hexadecimal.  nbytes: its size."""

    digest: str
    nbytes: int


def emit_description(
    generated: Generated,
    name: str,
    triple: str,
    variants: Sequence[Variant],
    weight_file: WeightFile,
    rope: RopeSwitch | None = None,
) -> str:
    """The C source of `bsm_this_model` (native/internal.h).

    name: of the model, in messages.  variants: the best first; a processor runs the first whose
    features it has.
    """
    state = generated.state
    info = _info(generated, name, triple, weight_file)
    places = state.named_offsets() if info["steering_layers"] else {}
    rings, parts, named = _rings(state), _parts(state), _named(state)
    fields = {
        "info": "{" + ", ".join(f".{k} = {v}" for k, v in info.items()) + "}",
        "weights_bytes": max((w.offset + w.nbytes for w in generated.weights), default=0),
        "state_header": "state_header",
        "state_header_words": state.header_words,
        "rings": "rings" if rings else "NULL",
        "ring_count": len(rings),
        "parts": "parts" if parts else "NULL",
        "part_count": len(parts),
        "named_states": "named_states" if named else "NULL",
        "named_state_count": len(named),
        "directions_offset": places.get(DIRECTIONS, 0),
        "scales_offset": places.get(SCALES, 0),
        "mutates": int(state.mutates),
        "rope_threshold": rope.threshold if rope else 0,
        "rope_kind": _ROPE[rope.kind] if rope else "BSM_ROPE_FIXED",
        "variants": "variants",
        "variant_count": len(variants),
    }
    return "".join(
        [
            '#include "internal.h"\n\n',
            *(_entries(v.prefix) for v in variants),
            _array("static const int64_t state_header", [str(int(w)) for w in state.header()]),
            _array("static const bsm_ring rings", rings),
            _array("static const bsm_part parts", parts),
            _array("static const bsm_region named_states", named),
            *(_features(i, v) for i, v in enumerate(variants)),
            _array(
                "static const bsm_variant variants",
                [_variant(i, v) for i, v in enumerate(variants)],
            ),
            "const bsm_description bsm_this_model = {\n",
            *(f"    .{key} = {value},\n" for key, value in fields.items()),
            "};\n",
        ]
    )


def _info(
    generated: Generated, name: str, triple: str, weight_file: WeightFile
) -> dict[str, str | int]:
    """The fields of `bsm_info` (native/api.h)."""
    state, scratch = generated.state, generated.scratch
    layers, width = _steering_shape(state)
    return {
        "name": _string(name),
        "target": _string(triple),
        "abi_hash": _string(header_hash(generated)),
        "weights_hash": _string(weight_file.digest),
        "vocab_size": generated.vocab_size,
        "hidden_size": generated.hidden_size,
        "context_length": state.capacity,
        "chunk": state.chunk,
        "weights_file_bytes": weight_file.nbytes,
        "state_bytes": state.nbytes,
        "scratch_shared_bytes": scratch.shared_bytes,
        "scratch_thread_bytes": scratch.thread_bytes,
        "steering_layers": layers,
        "steering_width": width,
    }


def _rings(state: StateLayout) -> list[str]:
    """What the rings of the state keep: see `bsm_ring`. Layers of equal rings are one entry."""
    layers: list[KVLayer | SharedLayer] = [*state.layers, *state.shared]
    found = [(1, layer.window, state.ring_rows(layer)) for layer in layers if layer.window]
    found += [(s.rate, s.reach, state.pending_rows(s)) for s in state.streams]
    return [f"{{{a}, {b}, {c}}}" for a, b, c in dict.fromkeys(found)]


def _parts(state: StateLayout) -> list[str]:
    """What tokens fill: see `bsm_part`; in the order of `runtime.state.filled`."""
    words = state.header()[HEADER_WORDS:]
    found: list[str] = []
    for index, entry in enumerate(state.entries):
        offsets = words[LAYER_WORDS * index :][:2]
        rows = _rows(state, entry)
        for offset, numbers in zip(offsets, rows, strict=False):
            place = state.header_bytes + int(offset)
            found.append("{" + ", ".join(map(str, (place, *numbers))) + "}")
    return found


def _rows(state: StateLayout, entry: Entry) -> list[tuple[int, ...]]:
    """copies, stride, rate, rows, block_rows, block_bytes of the one or two parts of an entry."""
    size = STORAGE_BYTES[state.kv_dtype]
    if isinstance(entry, CompressedStream):
        pending = 2 * entry.projected * STORAGE_BYTES["f32"]
        block = KEY_BLOCK * entry.width * size
        return [
            (1, 0, 1, state.pending_rows(entry), 1, pending),
            (1, 0, entry.rate, state.compressed_rows(entry), KEY_BLOCK, block),
        ]
    rows = state.ring_rows(entry)
    if isinstance(entry, SharedLayer):
        return [(1, 0, 1, rows, 1, entry.width * size)]
    keys, values = entry.key_width * size, entry.value_width * size
    return [
        (entry.kv_heads, rows * keys, 1, rows, KEY_BLOCK, KEY_BLOCK * keys),
        (entry.kv_heads, rows * values, 1, rows, 1, values),
    ]


def _named(state: StateLayout) -> list[str]:
    offsets = state.named_offsets()
    return [f"{{{offsets[s.name]}, {s.nbytes}, {int(s.given)}}}" for s in state.named]


def _steering_shape(state: StateLayout) -> tuple[int, int]:
    """Layers and width of the directions that steer; (0, 0) without them."""
    shapes = {named.name: named.shape for named in state.named}
    if not {DIRECTIONS, SCALES} <= shapes.keys():
        return 0, 0
    layers, width = shapes[DIRECTIONS]
    return layers, width


def _entries(prefix: str) -> str:
    return "".join(f"extern bsm_entry {_entry(e, prefix)};\n" for e in ENTRY_POINTS)


def _entry(name: str, prefix: str) -> str:
    return f"{prefix}_mlir_ciface_{name}"


def _features(index: int, variant: Variant) -> str:
    names = [*map(_string, variant.features), "NULL"]
    return _array(f"static const char *const features_{index}", names)


def _variant(index: int, variant: Variant) -> str:
    prefill, decode = (_entry(e, variant.prefix) for e in ENTRY_POINTS)
    return f"{{features_{index}, {prefill}, {decode}}}"


def _array(declaration: str, items: Iterable[str]) -> str:
    """A C array, or nothing for no items."""
    lines = "".join(f"    {item},\n" for item in items)
    return f"{declaration}[] = {{\n{lines}}};\n\n" if lines else ""


def _string(text: str) -> str:
    """A C string literal of the text in UTF-8, without trigraphs or anything to misread."""
    body = "".join(chr(b) if b in _PLAIN else f"\\{b:03o}" for b in text.encode())
    return f'"{body}"'
