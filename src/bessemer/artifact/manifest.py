"""`manifest.json`: everything about an artifact that is neither code nor numbers.

A manifest describes the memory that compiled code is handed: where each weight lies, how the state
and the scratch are laid out, which entry points there are. The native code trusts these numbers,
so a manifest is checked here in full before anything is mapped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bessemer.artifact.layout import (
    STORAGE_BYTES,
    STREAMS,
    ScratchLayout,
    StateLayout,
    StoredWeight,
    align,
)
from bessemer.errors import ArtifactError

MANIFEST_FILE = "manifest.json"
LIBRARY_FILE = "model.so"
ARCHIVE_FILE = "libmodel.a"
HEADER_FILE = "model.h"
WEIGHTS_FILE = "weights.bin"

FORMAT_NAME = "bessemer-artifact"
# Raised whenever an older reader would misread what a newer writer wrote.
FORMAT_VERSION = 2

ENTRY_POINTS = ("forward_prefill", "forward_decode")

# The call that the entry points take, in words. Its hash, together with the layouts, is the ABI
# hash: code, weights and runtime that disagree in any of it can't meet.
ABI: dict[str, Any] = {
    "version": 1,
    "arguments": [
        "context: bsm_context*",
        "weights: memref<?xi8>",
        "ids: memref<?xi64>",
        "positions: memref<?xi64>",
        "slots: memref<?xi64>",
        "output_rows: memref<?xi64>",
        "state: memref<?xi8>",
        "scratch: memref<?xi8>",
        "logits: memref<?x?xf32>",
    ],
    "context": [
        "pool: ptr",
        "threads: i64",
        "sequence_length: i64",
        "hidden: ptr",
        "cancel: i32",
        "status: i32",
        "reserved: 8 x u64",
    ],
}

ROPE_KINDS = ("longrope", "dynamic")


@dataclass(frozen=True)
class RopeSwitch:
    """Rotary factors that depend on the length of the whole sequence.

    kind: "longrope" has one set of factors up to `threshold` tokens and another one beyond;
    "dynamic" has one set up to `threshold` and then one for every length.
    """

    kind: str
    threshold: int

    def regime(self, length: int) -> int:
        """A number that is equal for two sequence lengths exactly if their factors are."""
        if self.kind == "longrope":
            return min(max(length, self.threshold), self.threshold + 1)
        return max(length, self.threshold)


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of a file. Of weights.bin the hash is that of its tensor table,
    which holds the hash of each tensor.
    """

    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Level:
    """The same model's code for more of a processor's features, in the same library.

    cpu: LLVM's name.  required_features: what the CPU must report.  entry_points: as in `Manifest`.
    """

    cpu: str
    required_features: tuple[str, ...]
    entry_points: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    name: what the model is called in messages.  config, generation_config: as Hugging Face has
    them.  context_length: tokens of a session.  options: those of the compilation.  target:
    triple, CPU and features that the code was made for.  required_features: what this machine's
    CPU must report.  entry_points: "forward_prefill" and "forward_decode" to symbol.
    prefix: what every global symbol of the library begins with.
    weights, weight_hashes: the tensors of weights.bin, and the SHA-256 of each.
    files: relative path to size and hash, the manifest itself excluded.
    source: kind, name and content key of the checkpoint.  versions: of Bessemer and of what it
    compiled with.  key: the cache's key, or "".  hidden_size: 0 where the logits come from no
    linear layer, and no hidden state is given.  levels: further code for better processors, the
    best first; `target`, `required_features` and `entry_points` are those of the least.
    """

    name: str
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    vocab_size: int
    hidden_size: int
    options: Mapping[str, Any]
    target: Mapping[str, Any]
    required_features: tuple[str, ...]
    entry_points: Mapping[str, str]
    weights: tuple[StoredWeight, ...]
    weight_hashes: Mapping[str, str]
    state: StateLayout
    scratch: ScratchLayout
    files: Mapping[str, FileRecord]
    source: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    rope: RopeSwitch | None = None
    prefix: str = ""
    key: str = ""
    compile_seconds: float = 0.0
    levels: tuple[Level, ...] = ()

    def entry_points_for(self, features: frozenset[str]) -> Mapping[str, str]:
        """The entry points of the best code for a CPU with these features."""
        for level in self.levels:
            if features.issuperset(level.required_features):
                return level.entry_points
        return self.entry_points

    @property
    def context_length(self) -> int:
        return self.state.capacity

    @property
    def abi_hash(self) -> str:
        return abi_hash(self.weights, self.state, self.scratch, self.vocab_size, self.hidden_size)

    @property
    def weights_digest(self) -> str:
        """Identifies the stored numbers: the hash of the tensor table with its hashes."""
        return table_digest(weight_table(self.weights, self.weight_hashes))

    @property
    def weights_nbytes(self) -> int:
        """Bytes of weights.bin that hold tensors."""
        return max((w.offset + w.nbytes for w in self.weights), default=0)

    def to_json(self) -> str:
        """The text of manifest.json."""
        data = {
            "format": {"name": FORMAT_NAME, "version": FORMAT_VERSION},
            "model": {
                "name": self.name,
                "vocab_size": self.vocab_size,
                "hidden_size": self.hidden_size,
                "rope": None if self.rope is None else asdict(self.rope),
                "config": dict(self.config),
                "generation_config": dict(self.generation_config),
            },
            "source": dict(self.source),
            "options": dict(self.options),
            "target": dict(self.target),
            "required_features": list(self.required_features),
            "abi": {
                "hash": self.abi_hash,
                "entry_points": dict(self.entry_points),
                "prefix": self.prefix,
            },
            "levels": [
                {
                    "cpu": level.cpu,
                    "required_features": list(level.required_features),
                    "entry_points": dict(level.entry_points),
                }
                for level in self.levels
            ],
            "state": self.state.to_json(),
            "scratch": asdict(self.scratch),
            "weights": weight_table(self.weights, self.weight_hashes),
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
            "versions": dict(self.versions),
            "key": self.key,
            "compile_seconds": self.compile_seconds,
        }
        return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = MANIFEST_FILE) -> Manifest:
        """Parse and check a manifest. `where` names it in errors.

        Raises ArtifactError for anything that isn't a whole and consistent manifest of this
        format version.
        """
        try:
            data = json.loads(text)
            header = data["format"]
            known = header["name"] == FORMAT_NAME
        except (KeyError, TypeError):
            raise ArtifactError(
                f"{where} is not the manifest of a compiled model: it names no format; make one "
                "with `bessemer compile MODEL -o DIR`"
            ) from None
        except (ValueError, RecursionError) as error:
            raise ArtifactError(
                f"{where} is damaged, it is no JSON ({error}): compile the model again"
            ) from None
        if not known:
            raise ArtifactError(f"{where} belongs to {header['name']!r}, not to Bessemer")
        if header.get("version") != FORMAT_VERSION:
            raise ArtifactError(
                f"{where} has format version {header.get('version')}, and this Bessemer reads "
                f"version {FORMAT_VERSION}: compile the model again with `bessemer compile`"
            )
        try:
            manifest = cls._parse(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"{where} is damaged ({type(error).__name__}: {error}): compile the model again"
            ) from None
        check_layout(manifest, where)
        if data["abi"]["hash"] != manifest.abi_hash:
            raise ArtifactError(
                f"{where} is damaged: its ABI hash {str(data['abi']['hash'])[:12]} is not that of "
                f"the layouts it lists, {manifest.abi_hash[:12]}: compile the model again"
            )
        return manifest

    @classmethod
    def _parse(cls, data: dict[str, Any]) -> Manifest:
        model = data["model"]
        rope = model["rope"]
        scratch = ScratchLayout(**data["scratch"])
        return cls(
            name=str(model["name"]),
            config=dict(model["config"]),
            generation_config=dict(model["generation_config"]),
            vocab_size=_whole(model["vocab_size"], "vocab_size", 1),
            hidden_size=_whole(model["hidden_size"], "hidden_size", 0),
            options=dict(data["options"]),
            target=dict(data["target"]),
            required_features=tuple(map(str, data["required_features"])),
            entry_points={e: str(data["abi"]["entry_points"][e]) for e in ENTRY_POINTS},
            weights=tuple(_parse_weight(w) for w in data["weights"]),
            weight_hashes={w["name"]: str(w["sha256"]) for w in data["weights"]},
            state=StateLayout.from_json(data["state"]),
            scratch=ScratchLayout(
                _whole(scratch.shared_bytes, "shared_bytes", 0),
                _whole(scratch.thread_bytes, "thread_bytes", 0),
            ),
            files={
                str(name): FileRecord(_whole(f["nbytes"], name, 0), str(f["sha256"]))
                for name, f in data["files"].items()
            },
            source=dict(data["source"]),
            versions=dict(data["versions"]),
            rope=None if rope is None else _parse_rope(rope),
            prefix=str(data["abi"]["prefix"]),
            key=str(data["key"]),
            compile_seconds=float(data["compile_seconds"]),
            levels=tuple(_parse_level(level) for level in data["levels"]),
        )


def _whole(value: Any, name: str, least: int) -> int:
    if type(value) is not int or not least <= value < 1 << 62:
        raise ValueError(f"{name} is {value!r}")
    return value


def _parse_level(data: Mapping[str, Any]) -> Level:
    names = {e: str(data["entry_points"][e]) for e in ENTRY_POINTS}
    return Level(str(data["cpu"]), tuple(map(str, data["required_features"])), names)


def _parse_rope(data: Mapping[str, Any]) -> RopeSwitch:
    if data["kind"] not in ROPE_KINDS:
        raise ValueError(f"rope kind {data['kind']!r}")
    return RopeSwitch(data["kind"], _whole(data["threshold"], "threshold", 1))


def _parse_weight(data: Mapping[str, Any]) -> StoredWeight:
    return StoredWeight(
        name=str(data["name"]),
        shape=tuple(_whole(n, "a dimension", 0) for n in data["shape"]),
        dtype=str(data["dtype"]),
        layout=str(data["layout"]),
        offset=_whole(data["offset"], "an offset", 0),
        nbytes=_whole(data["nbytes"], "a size", 0),
    )


def is_artifact(path: str | Path) -> bool:
    """Whether `path` is a folder with an artifact's manifest, sound or damaged."""
    folder = Path(path)
    try:
        # Other tools write a manifest.json too: ours names its format at the start.
        with (folder / MANIFEST_FILE).open("rb") as stream:
            if f'"{FORMAT_NAME}"'.encode() in stream.read(256):
                return True
        # Beside a library and its weights it can be no other's.
        return (folder / LIBRARY_FILE).is_file() and (folder / WEIGHTS_FILE).is_file()
    except OSError:
        return False


def check_layout(manifest: Manifest, where: str) -> None:
    """Raise ArtifactError unless weights and state can be addressed as the manifest says."""
    end = 0
    names: set[str] = set()
    for weight in sorted(manifest.weights, key=lambda w: w.offset):
        if weight.dtype not in STORAGE_BYTES or weight.layout not in ("plain", "panels"):
            problem = f"unknown storage {weight.dtype}/{weight.layout}"
        elif weight.layout == "panels" and len(weight.shape) < 2:
            problem = f"panels of shape {list(weight.shape)}"
        elif StoredWeight.place(*_identity(weight), weight.offset) != weight:
            problem = "its offset or size doesn't fit its shape and dtype"
        elif weight.offset < end:
            problem = "it overlaps the weight before it"
        elif weight.name in names:
            problem = "there are two of that name"
        else:
            names.add(weight.name)
            end = weight.offset + weight.nbytes
            continue
        raise ArtifactError(f"{where} is damaged: weight {weight.name!r}: {problem}")
    _check_state(manifest.state, where)


def _identity(weight: StoredWeight) -> tuple[str, tuple[int, ...], str, str]:
    return weight.name, weight.shape, weight.dtype, weight.layout


def _check_state(state: StateLayout, where: str) -> None:
    numbers = [state.capacity, state.chunk, state.slots]
    for layer in state.layers:
        numbers += [layer.kv_heads, layer.key_width, layer.value_width]
    for ring in state.shared:
        numbers += [ring.width, ring.window]
    for stream in state.streams:
        numbers += [stream.width, stream.rate]
    good = all(type(n) is int and 0 < n < 1 << 32 for n in numbers)
    good &= all(type(x.overlap) is bool and x.stream in STREAMS for x in state.streams)
    good &= all(type(x.window) is int and x.window >= 0 for x in state.layers)
    good &= state.kv_dtype in STORAGE_BYTES
    good &= all(n.dtype in STORAGE_BYTES for n in state.named)
    if not good:
        raise ArtifactError(f"{where} is damaged: the state layout makes no sense")


def weight_table(
    weights: Sequence[StoredWeight], hashes: Mapping[str, str]
) -> list[dict[str, Any]]:
    """The weights as the manifest and the end of weights.bin list them, each with its hash."""
    return [{**w.to_json(), "shape": list(w.shape), "sha256": hashes[w.name]} for w in weights]


def table_digest(table: list[dict[str, Any]]) -> str:
    """SHA-256 of a weight table."""
    return hashlib.sha256(canonical(table)).hexdigest()


def canonical(value: Any) -> bytes:
    """JSON that is the same bytes for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def abi_hash(
    weights: Sequence[StoredWeight],
    state: StateLayout,
    scratch: ScratchLayout,
    vocab_size: int,
    hidden_size: int,
) -> str:
    """SHA-256 over all that code and runtime must agree on: the call, the places of weights,
    state and scratch, and the widths of what comes back.
    """
    parts = {
        "abi": ABI,
        "weights": [{**w.to_json(), "shape": list(w.shape)} for w in weights],
        "state": state.to_json(),
        "scratch": asdict(scratch),
        "weights_end": align(max((w.offset + w.nbytes for w in weights), default=0)),
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
    }
    return hashlib.sha256(canonical(parts)).hexdigest()
