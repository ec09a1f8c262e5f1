"""Artifacts around `toy_model.c`, and what it must answer."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.artifact.layout import (
    KVLayer,
    NamedState,
    ScratchLayout,
    StateLayout,
    StoredWeight,
)
from bessemer.artifact.manifest import RopeSwitch
from bessemer.artifact.reader import open_artifact
from bessemer.artifact.writer import write_artifact
from bessemer.runtime.engine import Engine
from bessemer.runtime.session import Session

VOCAB = 50
WINDOW = 4
CHUNK = 8
CAPACITY = 256
NAN, SLOW, STRAY = 13, 7, 8
# The sum of the seven, plus BIAS of the token, is what `expected` computes.
BIAS = np.linspace(0, 0.01, VOCAB, dtype=np.float32)


SOURCE = Path(__file__).with_name("toy_model.c")
NO_THRESHOLD = 1_000_000


def toy_flags(vocab: int = VOCAB, threshold: int = NO_THRESHOLD) -> list[str]:
    """What the C compiler is told for the toy."""
    from bessemer.native import FOLDER

    flags = [f"-I{FOLDER}", f"-DVOCAB={vocab}", f"-DWINDOW={WINDOW}"]
    return [*flags, f"-DTHRESHOLD={threshold}", "-D_GNU_SOURCE"]


@functools.cache
def library(vocab: int = VOCAB, threshold: int = NO_THRESHOLD) -> Path:
    """The compiled toy; kept for the whole test run."""
    from bessemer.backend.link import archive, compile_c, compile_native, link_shared
    from bessemer.backend.target import Target

    folder = Path(tempfile.mkdtemp(prefix="bessemer-toy-"))
    target = Target.native()
    native = compile_native(target, folder)
    toy = folder / "toy.o"
    compile_c(SOURCE, toy, target, toy_flags(vocab, threshold))
    made = folder / "made"
    made.mkdir()
    link_shared([toy, *native], made / "model.so", target)
    archive([toy, *native], made / "libmodel.a")
    (made / "model.h").touch()
    return made


@dataclass(frozen=True)
class Generated:
    """Stands for the result of code generation."""

    weights: tuple[StoredWeight, ...]
    expressions: dict[str, Any]
    state: StateLayout
    scratch: ScratchLayout
    vocab_size: int
    hidden_size: int


def toy_generated(
    *,
    capacity: int = CAPACITY,
    chunk: int = CHUNK,
    window: int = WINDOW,
    named: bool = False,
    vocab: int = VOCAB,
) -> Generated:
    """What code generation would say of the toy."""
    states = (NamedState("sum", "i64", (1,)),) if named else ()
    layers = (KVLayer(0, 1, 1, 1, 0), KVLayer(1, 1, 1, 1, window))
    return Generated(
        weights=(StoredWeight.place("bias", (vocab,), "f32", "plain", 0),),
        expressions={},
        state=StateLayout(layers, "f32", capacity, chunk, named=states),
        scratch=ScratchLayout(128, 64),
        vocab_size=vocab,
        hidden_size=4,
    )


def write_toy(
    folder: Path,
    *,
    capacity: int = CAPACITY,
    chunk: int = CHUNK,
    window: int = WINDOW,
    named: bool = False,
    rope: RopeSwitch | None = None,
    vocab: int = VOCAB,
    bias: np.ndarray | None = None,
    write_tokenizer: Callable[[Path], None] | None = None,
    **changes: Any,
) -> Path:
    """An artifact of the toy."""
    threshold = rope.threshold if rope else NO_THRESHOLD
    generated = toy_generated(
        capacity=capacity, chunk=chunk, window=window, named=named, vocab=vocab
    )
    values = BIAS if bias is None else bias
    arguments: dict[str, Any] = {
        "write_code": lambda to, digest: shutil.copytree(
            library(vocab, threshold), to, dirs_exist_ok=True
        ),
        "read": lambda name: values,
        "name": "toy",
        "config": {"model_type": "toy"},
        "generation_config": {},
        "options": {},
        "target": {},
        "required_features": (),
        "rope": rope,
        "write_tokenizer": write_tokenizer,
    }
    from bessemer.backend.target import Target

    arguments["target"] = Target.native().to_json()
    return write_artifact(folder, generated=generated, **{**arguments, **changes})


def toy_engine(folder: Path, threads: int = 2, **options: Any) -> Engine:
    return Engine.load(open_artifact(write_toy(folder / "toy", **options)), threads)


def toy_session(folder: Path, **options: Any) -> Session:
    return Session(toy_engine(folder, **options))


def expected(
    tokens: Sequence[int], position: int = -1, named: bool = False, vocab: int = VOCAB
) -> np.ndarray:
    """The logits [vocab] after the token at `position`, having read all of `tokens`."""
    p = position % len(tokens)
    everything = near = kept = 0
    for q in range(p + 1):
        everything = (everything + tokens[q] * (q + 3)) % 997
        if q > p - WINDOW:
            near = (near + tokens[q] * (q + 3)) % 991
        kept = (kept * 7 + tokens[q] + 1) % 1009
    kept = kept if named else 0
    v = np.arange(vocab)
    mixed = (everything * 31 + near * 17 + kept * 13 + (v + 1) * (everything + near + 7)) % 101
    bias = BIAS if vocab == VOCAB else np.zeros(vocab, np.float32)
    return (mixed / np.float32(8)).astype(np.float32) + bias
