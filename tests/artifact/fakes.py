"""A small artifact whose library is any file: what the writer and the reader are tried on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.artifact.layout import KVLayer, ScratchLayout, StateLayout, StoredWeight
from bessemer.artifact.writer import write_artifact
from bessemer.graph import DType, TensorType, Value, emit, param


def lay_out(*specs: tuple[str, tuple[int, ...], str, str]) -> tuple[StoredWeight, ...]:
    """Weights one behind the other."""
    placed: list[StoredWeight] = []
    end = 0
    for spec in specs:
        placed.append(StoredWeight.place(*spec, end))
        end = placed[-1].offset + placed[-1].nbytes
    return tuple(placed)


WEIGHTS = lay_out(
    ("embed", (70, 9), "f16", "panels"),
    ("norm", (9,), "f32", "plain"),
    ("merged", (2, 33, 5), "bf16", "panels"),
)
STATE = StateLayout((KVLayer(0, 2, 4, 6, 0),), "f32", 64, 16)
SCRATCH = ScratchLayout(256, 64)


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """The checkpoint: `merged` is stacked from `up` and `gate`."""
    rng = np.random.default_rng(seed)
    shapes = {"embed": (70, 9), "norm": (9,), "up": (33, 5), "gate": (33, 5)}
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def stacked() -> Value:
    halves = [param(n, TensorType(DType.F32, (33, 5))) for n in ("gate", "up")]
    rows = [emit("reshape", v, shape=(1, 33, 5)) for v in halves]
    return emit("concat", *rows, axis=-3)


@dataclass(frozen=True)
class FakeGenerated:
    """Stands for the result of code generation."""

    weights: tuple[StoredWeight, ...] = WEIGHTS
    expressions: Mapping[str, Value] = field(default_factory=lambda: {"merged": stacked()})
    state: StateLayout = STATE
    scratch: ScratchLayout = SCRATCH
    vocab_size: int = 70
    hidden_size: int = 9


def write_fake(
    destination: Path,
    *,
    seed: int = 0,
    generated: FakeGenerated | None = None,
    code: bytes = b"code",
    **changes: Any,
) -> Path:
    """An artifact of `tensors(seed)` at `destination`."""

    def write_code(folder: Path, weights_digest: str) -> None:
        (folder / "model.so").write_bytes(code)
        (folder / "libmodel.a").write_bytes(b"archive of " + code)
        (folder / "model.h").write_text("/* header */\n")

    numbers = tensors(seed)
    arguments: dict[str, Any] = {
        "generated": generated or FakeGenerated(),
        "write_code": write_code,
        "read": lambda name: numbers[name],
        "name": "fake",
        "config": {"model_type": "fake", "eos_token_id": 3},
        "generation_config": {},
        "options": {"weights": "f16", "kv": "f32"},
        "required_features": (),
        "target": native_target(),
        **changes,
    }
    return write_artifact(destination, **arguments)


def native_target() -> dict[str, Any]:
    """A target that the machine running the tests can run."""
    import platform

    arch = platform.machine().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
    system = "darwin" if platform.system() == "Darwin" else "unknown-linux-gnu"
    return {"triple": f"{arch}-{system}", "cpu": "generic", "features": []}
