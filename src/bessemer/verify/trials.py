"""Runs of a compiled model whose logits are going to be compared: prefill and decode.

The compiled model runs first and is released before the reference is loaded, so that the weights
of both are never in memory together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bessemer.artifact.manifest import Manifest
from bessemer.artifact.reader import Artifact
from bessemer.runtime.engine import Engine
from bessemer.runtime.session import Session

F32 = npt.NDArray[np.float32]

# Ids of the prompts come from here: the same in every verification, without structure that a
# wrong position or a wrong mask could hide behind.
SEED = 20240607
# Pieces in which a prompt is fed again: steps of one row, of an odd count, and the rest.
PIECES = (1, 7)
# Tokens beyond a chunk, or around a rotary threshold, so that both sides of it are compared.
BEYOND = 5
# Tokens of the text: some hundred distributions, and a second of PyTorch for a model of 135M.
TEXT_TOKENS = 256
# Multiply-adds that a run across a chunk's end or a rotary threshold may take, in the compiled
# model and again in the reference: some minutes on two cores.
LONG_RUN_OPERATIONS = 4e12


@dataclass
class Section:
    """Logits of the rows [first, first + len(logits)) of a run, from one way of feeding them.

    length: tokens that the session held when these rows were computed.
    pieces: how many tokens each prefill call was given.  steps: of decode after them.
    """

    name: str
    first: int
    length: int
    logits: F32
    pieces: tuple[int, ...]
    steps: int = 0


@dataclass
class Trial:
    """One token sequence, and the logits that the compiled model gave along it.

    ids: the prompt at first; decoding appends to it.  is_text: they say something.
    """

    ids: list[int]
    sections: list[Section] = field(default_factory=list)
    is_text: bool = False

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)


@dataclass(frozen=True)
class TrialPlan:
    """lengths: of the prompts.  decode_steps: after each.  long_lengths: prompts of which only the
    rows at the end are compared.  text: tokens of a text, without decode steps.
    """

    lengths: tuple[int, ...]
    decode_steps: int
    long_lengths: tuple[int, ...] = ()
    text: tuple[int, ...] = ()

    @classmethod
    def for_model(
        cls,
        manifest: Manifest,
        lengths: Sequence[int],
        decode_steps: int,
        text: Sequence[int] = (),
    ) -> TrialPlan:
        """What fits the context of a model, with as much of the text, and prompts that cross a
        chunk's end and a rotary threshold, as the model is small enough for.
        """
        most = manifest.context_length - decode_steps
        fitting = tuple(dict.fromkeys(min(n, most) for n in lengths if n > 0)) if most > 0 else ()
        wanted = [manifest.state.chunk + BEYOND]
        if manifest.rope is not None:
            wanted.append(manifest.rope.threshold - min(BEYOND, decode_steps // 2))
        parameters = sum(int(np.prod(w.shape, dtype=np.int64)) for w in manifest.weights)
        affordable = LONG_RUN_OPERATIONS / max(parameters, 1)
        long = tuple(n for n in dict.fromkeys(wanted) if 0 < n <= min(most, affordable))
        shown = int(min(TEXT_TOKENS, manifest.context_length, affordable))
        return cls(
            fitting,
            decode_steps,
            tuple(n for n in long if n not in fitting),
            tuple(text[:shown]) if min(shown, len(text)) > 1 else (),
        )

    def trials(self) -> int:
        return len(self.lengths) + len(self.long_lengths) + bool(self.text)


def run_trials(
    artifact: Artifact,
    plan: TrialPlan,
    *,
    threads: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Trial]:
    """Run the compiled model. Its library and weights are released when this returns.

    Raises ArtifactError when it can't be loaded, GenerationError when it computes NaN.
    """
    engine = Engine.load(artifact, threads, "map")
    random = np.random.default_rng(SEED)
    found = []
    for trial in _planned(engine, plan, random):
        found.append(trial)
        progress(len(found), plan.trials())
    return found


def _planned(engine: Engine, plan: TrialPlan, random: np.random.Generator) -> Iterator[Trial]:
    vocab = engine.manifest.vocab_size
    for length in plan.lengths:
        ids = random.integers(0, vocab, length).tolist()
        session = Session(engine)
        logits = session.prefill(ids, all_logits=True)
        trial = Trial(ids, [Section(f"prefill {length}", 0, length, logits, (length,))])
        if length > 1:
            trial.sections.append(_in_pieces(engine, ids))
        _decode(session, trial, logits[-1], plan.decode_steps)
        yield trial
    for length in plan.long_lengths:
        ids = random.integers(0, vocab, length).tolist()
        session = Session(engine)
        last = session.prefill(ids)
        chunk = engine.manifest.state.chunk
        name = f"prefill {length}" + (f" in chunks of {chunk}" if length > chunk else "")
        trial = Trial(ids, [Section(name, length - 1, length, last[None], (length,))])
        _decode(session, trial, last, plan.decode_steps)
        yield trial
    if plan.text:
        ids, length = list(plan.text), len(plan.text)
        logits = Session(engine).prefill(ids, all_logits=True)
        name = f"text of {length} tokens"
        yield Trial(ids, [Section(name, 0, length, logits, (length,))], is_text=True)


def _in_pieces(engine: Engine, ids: Sequence[int]) -> Section:
    """The logits of the last piece of a prompt that is fed in several."""
    session = Session(engine)
    pieces: list[int] = []
    for size in PIECES:
        if sum(pieces) + size < len(ids):
            session.prefill(ids[sum(pieces) : sum(pieces) + size])
            pieces.append(size)
    at = sum(pieces)
    pieces.append(len(ids) - at)
    logits = session.prefill(ids[at:], all_logits=True)
    name = f"prefill {'+'.join(map(str, pieces))}"
    return Section(name, at, len(ids), logits, tuple(pieces))


def _decode(session: Session, trial: Trial, last: F32, steps: int) -> None:
    """Greedy steps; each becomes a section of one row."""
    for step in range(1, steps + 1):
        token = int(np.argmax(last))
        row = len(trial.ids)
        trial.ids.append(token)
        last = session.decode(token)
        name = f"decode {steps} steps after {trial.prompt}"
        pieces = (trial.prompt,)
        trial.sections.append(Section(name, row, row + 1, last[None], pieces, step))
