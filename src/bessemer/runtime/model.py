"""A loaded artifact that answers: text in, text out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.arguments import checked_path, shown
from bessemer.artifact.manifest import Manifest
from bessemer.artifact.reader import Artifact, open_artifact
from bessemer.errors import ArtifactError, UsageError
from bessemer.runtime.chat_template import encode_messages
from bessemer.runtime.engine import Engine, check_threads
from bessemer.runtime.generate import Generation, GenerationResult, generate_stream
from bessemer.runtime.logprobs import TokenLogprobs
from bessemer.runtime.sampling import SamplingOptions
from bessemer.runtime.session import Session
from bessemer.runtime.token_ids import checked_ids
from bessemer.runtime.tokenizer import Tokenizer
from bessemer.steering import DIRECTIONS, Steering, read_directions

# Sessions that are kept for the next `generate`: one serves a program that asks one thing after
# the other without giving its memory back in between.
IDLE_SESSIONS = 1

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class Model:
    """A compiled model. Threads may share it; each conversation is a `Session` of its own."""

    def __init__(
        self, artifact: Artifact, threads: int | None = None, weights_mode: str | None = None
    ) -> None:
        """The model in an opened artifact. Code and weights are loaded when first needed.

        threads: the cores that this process may use when None.  weights_mode: "map" or "huge",
        see `weights.load_weights`.
        """
        self._artifact = artifact
        self._threads = threads
        self._weights_mode = weights_mode
        self._loading = threading.Lock()
        self._engine: Engine | None = None
        self._idle: list[Session] = []
        self._steering: Steering | None = None

    @classmethod
    def load(
        cls, folder: str | Path, *, threads: int | None = None, weights_mode: str | None = None
    ) -> Model:
        """The model in `folder`, ready to run. Raises ArtifactError when it can't run here."""
        check_threads(threads)
        model = cls(open_artifact(folder), threads, weights_mode)
        model.engine  # noqa: B018 - load it now
        return model

    def __repr__(self) -> str:
        return f"<bessemer.Model {self.name!r} in {str(self.path)!r}>"

    # -- what it is ----------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The artifact's folder."""
        return self._artifact.folder

    @property
    def manifest(self) -> Manifest:
        """What the artifact says about itself."""
        return self._artifact.manifest

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def context_length(self) -> int:
        """Tokens that a session can hold."""
        return self.manifest.context_length

    @property
    def vocab_size(self) -> int:
        """The width of logits."""
        return self.manifest.vocab_size

    @property
    def threads(self) -> int:
        """Threads of a call."""
        return self.engine.threads

    @property
    def engine(self) -> Engine:
        """The loaded code and weights."""
        with self._loading:
            if self._engine is None:
                self._engine = Engine.load(self._artifact, self._threads, self._weights_mode)
            return self._engine

    @property
    def has_tokenizer(self) -> bool:
        """Whether text can be used; else token ids can."""
        return (self.path / "tokenizer.json").is_file()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ArtifactError when the artifact has none."""
        if not self.has_tokenizer:
            raise ArtifactError(self._no_tokenizer())
        return Tokenizer.load(self.path)

    def _no_tokenizer(self) -> str:
        """Says where one would be found: of a model in the cache, which nobody looks into, beside
        what it was compiled from.
        """
        why = "the model came without one: feed token ids to a session"
        source = str(self.manifest.source.get("path", ""))
        if not self.manifest.key or not source:
            source = str(self.path)
        elif self.manifest.source.get("kind") == "gguf":  # its tokenizer is in the file
            return f"{source} has no tokenizer: {why}"
        return f"{source} has no tokenizer: {why}, or put the model's tokenizer.json there"

    # -- using it ------------------------------------------------------------------------------

    def session(self) -> Session:
        """A new empty conversation."""
        return self._steered(Session(self.engine))

    def steer(
        self,
        directions: npt.ArrayLike | None,
        *,
        attention: float = 0.0,
        ffn: float = 0.0,
    ) -> None:
        """Steer every conversation that begins from now on, see `bessemer.steering`.

        directions: float32 [layers, hidden]; None ends it.  attention, ffn: the scales.

        Raises UsageError when the model was compiled without steering, or they don't fit it.
        """
        if directions is None:
            self._steering = None
            return
        steering = Steering(np.array(directions, np.float32), attention, ffn)
        steering.check(*self.steering_shape)
        self._steering = steering

    @property
    def steering_shape(self) -> tuple[int, int]:
        """Layers and width of steering directions. UsageError where there is no steering."""
        for state in self.manifest.state.named:
            if state.name == DIRECTIONS:
                layers, hidden = state.shape
                return layers, hidden
        raise UsageError(
            f"{self.name} was compiled without steering; compile it with --steering (steering=True)"
        )

    def read_directions(self, path: str | Path) -> npt.NDArray[np.float32]:
        """Steering directions from a file, a row of float32 for each layer. Raises UsageError."""
        return read_directions(checked_path("--steering", path), *self.steering_shape)

    def _steered(self, session: Session) -> Session:
        """An empty session, steered as the model says."""
        steering = self._steering
        if steering is not None:
            session.steer(steering.directions, attention=steering.attention, ffn=steering.ffn)
        elif any(state.name == DIRECTIONS for state in self.manifest.state.named):
            session.steer(None)
        return session

    def generate(self, prompt: Prompt, **options: Any) -> str:
        """The continuation of `prompt`, as text. Options as for `stream`."""
        return self.stream(prompt, **options).complete().text

    def chat(self, messages: Messages, **options: Any) -> str:
        """The answer to a conversation, [{"role": "user", "content": ...}, ...], as text.

        Options as for `stream_chat`.
        """
        return self.stream_chat(messages, **options).complete().text

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | str = (),
        top_logprobs: int | None = None,
        on_logprobs: Callable[[TokenLogprobs], object] | None = None,
        **sampling: Any,
    ) -> Stream:
        """The continuation of `prompt` (text, or token ids) in pieces, as it comes.

        max_tokens: None goes on until the model ends or the context is full.  stop: strings that
        end it and are not shown.  top_logprobs: note the natural log-probability of every token by
        the raw logits, and those of so many likeliest ones, in `.result.logprobs`; on_logprobs is
        called with each.  sampling: the fields of `SamplingOptions` (temperature, top_k, top_p,
        min_p, repeat_penalty, seed, ...); greedy by default. The pieces joined are
        `.result.text`; `.result` tells more when they are taken.
        Raises UsageError for bad options and ContextLengthError for a prompt that doesn't fit.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, bytes) or not hasattr(prompt, "__len__"):
            raise UsageError(f"the prompt is {shown(prompt)}; it must be text, or token ids")
        else:
            ids = checked_ids(prompt, self.vocab_size).tolist()
        return self._start(
            ids,
            sampling,
            max_tokens=max_tokens,
            stops=stop,
            top_logprobs=top_logprobs,
            on_logprobs=on_logprobs,
        )

    def stream_chat(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | str = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        top_logprobs: int | None = None,
        on_logprobs: Callable[[TokenLogprobs], object] | None = None,
        **sampling: Any,
    ) -> Stream:
        """The answer to a conversation in pieces. Options as for `stream`; tools: for templates
        that know them.
        """
        return self._start(
            self.encode_chat(messages, tools=tools),
            sampling,
            max_tokens=max_tokens,
            stops=stop,
            top_logprobs=top_logprobs,
            on_logprobs=on_logprobs,
        )

    def encode_chat(
        self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The token ids of a conversation by the model's chat template, up to the answer.

        Raises ChatTemplateError when the model has no template or it refuses the messages.
        """
        return encode_messages(self.tokenizer, messages, tools)

    def _start(self, ids: Sequence[int], sampling: Mapping[str, Any], **how: Any) -> Stream:
        """how: as `generate_stream` takes it."""
        options = sampling_options(sampling, ("top_logprobs", "on_logprobs"))
        tokenizer = self.tokenizer
        session = self._borrow()
        try:
            generation = generate_stream(session, tokenizer, ids, sampling=options, **how)
        except BaseException:
            self._give_back(session)
            raise
        return Stream(self, session, generation)

    def _borrow(self) -> Session:
        try:
            return self._steered(self._idle.pop())
        except IndexError:
            return self.session()

    def _give_back(self, session: Session) -> None:
        session.rewind(0)
        if len(self._idle) < IDLE_SESSIONS:
            self._idle.append(session)


class Pieces(Iterator[str]):
    """Pieces of an answer; `result` when they are taken. `cancel()` ends it from any thread.

    ended: called once, when the last piece was taken.
    """

    def __init__(self, generation: Generation, ended: Callable[[], None]) -> None:
        self._generation = generation
        self._ended: Callable[[], None] | None = ended

    def __next__(self) -> str:
        try:
            return next(self._generation)
        except StopIteration:
            ended, self._ended = self._ended, None
            if ended is not None:
                ended()
            raise

    @property
    def result(self) -> GenerationResult:
        """The outcome. Raises UsageError while the answer isn't over."""
        return self._generation.result

    def cancel(self) -> None:
        """End the answer within the running step."""
        self._generation.cancel()

    def complete(self) -> GenerationResult:
        """Take all pieces; returns the result."""
        for _ in self:
            pass
        return self.result


class Stream(Pieces):
    """An answer of a session that the model lends for it."""

    def __init__(self, model: Model, session: Session, generation: Generation) -> None:
        super().__init__(generation, lambda: model._give_back(session))


def sampling_options(values: Mapping[str, Any], others: Sequence[str] = ()) -> SamplingOptions:
    """SamplingOptions of keyword arguments; UsageError names one that doesn't exist.

    others: what the caller takes beside them, max_tokens and stop.
    """
    known = set(SamplingOptions.__dataclass_fields__)
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(
            f"there is no option {', '.join(unknown)}; known: "
            f"{', '.join(['max_tokens', 'stop', *others, *sorted(known)])}"
        )
    return SamplingOptions(**values)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids two sequences have in common at the start."""
    count = min(len(first), len(second))
    differing = np.flatnonzero(np.asarray(first[:count]) != np.asarray(second[:count]))
    return int(differing[0]) if len(differing) else count
