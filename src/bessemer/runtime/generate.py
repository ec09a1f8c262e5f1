"""The token loop: a prompt goes into a session, text comes out piece by piece.

What the session holds afterwards: what it held before, the prompt, and the sampled tokens except
the last one. A sampled token is fed only when another one is wanted, so the token that ends the
answer (EOS, the end of a stop string, the last one allowed) never is. `GenerationResult.unfed` says
what is missing. A generation that is cancelled inside the prompt leaves the session as it was. For
the next turn of a conversation a caller either feeds `unfed` and the new text, or renders the whole
conversation anew, rewinds the session to the longest common prefix of both token lists, and feeds
the rest.

The end of the context is no error while an answer grows: with `capacity` c and a prompt that fills
it up to p, c - p + 1 tokens can be sampled (the last is not fed), and the reason is `length`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from bessemer.arguments import checked_whole
from bessemer.errors import ContextLengthError, UsageError
from bessemer.runtime.interrupt import StepCancelled
from bessemer.runtime.logprobs import TokenLogprobs, token_logprobs
from bessemer.runtime.sampling import Sampler, SamplingOptions
from bessemer.runtime.stops import StopMatcher
from bessemer.runtime.streaming import TextStreamer
from bessemer.runtime.token_ids import checked_ids
from bessemer.runtime.tokenizer import Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]


class SessionLike(Protocol):
    """What the loop needs of a session.

    A call that raises, KeyboardInterrupt included, leaves `position` at what is truly held.
    """

    @property
    def position(self) -> int:
        """How many tokens are held."""

    @property
    def capacity(self) -> int:
        """The context length in tokens."""

    def prefill(self, ids: Sequence[int], /) -> np.ndarray:
        """Feed `ids`; returns the logits of the last one: [vocab], float32."""

    def decode(self, token: int, /) -> np.ndarray:
        """Feed one token; returns its logits: [vocab], float32."""

    def rewind(self, n: int, /) -> None:
        """Keep the first n tokens."""


@dataclass(frozen=True)
class GenerationResult:
    """What came of a generation.

    text: the answer, without EOS, special tokens and stop strings. tokens: every sampled id, the
    EOS included. prompt_tokens: the length of this call's prompt. finish_reason: `stop` for an EOS
    or a stop string, `length` for max_tokens or the end of the context, `cancelled`. fed: how many
    of `tokens` the session holds. Times in seconds; decode_s covers every token after the first,
    and neither it nor prefill_s counts what the consumer does between two pieces. A time to the
    first token of None means that there was none. logprobs: one for each of `tokens`, if asked for.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    fed: int
    prefill_s: float
    decode_s: float
    time_to_first_token_s: float | None
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def unfed(self) -> tuple[int, ...]:
        """The sampled tokens that the session doesn't hold: the last one, or none."""
        return self.tokens[self.fed :]

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens over prefill time; 0 when nothing was fed."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first over decode time; 0 when there was none."""
        later = max(len(self.tokens) - 1, 0)
        return later / self.decode_s if later and self.decode_s > 0 else 0.0


class Generation(Iterator[str]):
    """Yields the answer in pieces, none of them empty; joined they are `result.text`.

    Nothing runs until the first piece is asked for. Ctrl-C, or `cancel()` from anywhere, ends it
    within the running step with the reason `cancelled`; the session stays usable. Any other error
    of the session or the sampler passes through and ends the generation.
    """

    def __init__(
        self,
        session: SessionLike,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None,
        sampler: Sampler,
        stops: StopMatcher,
        eos_ids: Collection[int],
        history: Sequence[int],
        on_token: Callable[[int], object] | None,
        top_logprobs: int | None,
        on_logprobs: Callable[[TokenLogprobs], object] | None,
    ) -> None:
        self._session = session
        self._tokenizer = tokenizer
        self._prompt = list(prompt_ids)
        self._start = session.position
        self._max_tokens = max_tokens
        self._sampler = sampler
        self._stops = stops
        self._eos_ids = frozenset(eos_ids)
        self._on_token = on_token
        self._top_logprobs = top_logprobs
        self._on_logprobs = on_logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._streamer = TextStreamer(tokenizer)
        self._history = [*history, *self._prompt]
        self._tokens: list[int] = []
        self._pieces: list[str] = []
        self._outbox: list[str] = []
        self._logits: np.ndarray | None = None
        self._cancelled = False
        self._failed = False
        self._began: float | None = None
        self._first_token_s: float | None = None
        self._prefill_s = 0.0
        self._decode_s = 0.0
        self._result: GenerationResult | None = None

    @property
    def result(self) -> GenerationResult:
        """The outcome. Raises UsageError while the generation isn't over, or when it failed."""
        if self._result is None and self._cancelled and not self._failed:
            self._close("cancelled")
        if self._result is None:
            state = "failed" if self._failed else "is not over: take all of its pieces first"
            raise UsageError(f"there is no result, the generation {state}")
        return self._result

    def cancel(self) -> None:
        """End the generation, and its running step where the session can; from any thread."""
        self._cancelled = True
        cancel_step = getattr(self._session, "cancel", None)
        if cancel_step is not None:
            cancel_step()

    def complete(self) -> GenerationResult:
        """Run to the end and return the result."""
        for _ in self:
            pass
        return self.result

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        while not self._outbox and self._result is None and not self._failed:
            try:
                if self._cancelled:
                    self._close("cancelled")
                else:
                    self._step()
            except (KeyboardInterrupt, StepCancelled):
                self._cancelled = True
            except BaseException:
                self._failed = True
                raise
        if not self._outbox:
            raise StopIteration
        piece = "".join(self._outbox)
        self._outbox.clear()
        return piece

    def _step(self) -> None:
        """Feed, sample and show one token."""
        began = time.perf_counter()
        if self._began is None:
            self._began = began
            self._start = self._session.position
            check_fits(self._session, len(self._prompt))
        if self._logits is None:
            self._logits = self._session.prefill(self._prompt)
            self._prefill_s = time.perf_counter() - began
            if self._max_tokens == 0:
                self._close("length")
                return
        else:
            self._logits = self._session.decode(self._tokens[-1])
        token = self._sampler.sample(self._logits, self._history)
        found = self._judged(self._logits, token)
        reason = self._take(token)
        now = time.perf_counter()
        if self._first_token_s is None:
            self._first_token_s = now - self._began
        else:
            self._decode_s += now - began
        if self._on_token is not None:
            self._on_token(token)
        if found is not None:
            self._logprobs.append(found)
            if self._on_logprobs is not None:
                self._on_logprobs(found)
        if reason is not None:
            self._close(reason)

    def _judged(self, logits: np.ndarray, token: int) -> TokenLogprobs | None:
        """The log-probabilities of a sampled token, if they are wanted."""
        if self._top_logprobs is None:
            return None
        return token_logprobs(logits, token, self._top_logprobs, self._tokenizer)

    def _take(self, token: int) -> FinishReason | None:
        """Note `token`, show the text that it completes; the reason when it is the last one."""
        last, text = token in self._eos_ids, ""
        if not last:
            text, last = self._stops.push(self._streamer.push(token))
        # One after the other, so that a Ctrl-C hardly ever finds a token without its text.
        self._tokens.append(token)
        self._history.append(token)
        self._emit(text)
        if last:
            return "stop"
        enough = self._max_tokens is not None and len(self._tokens) >= self._max_tokens
        full = self._session.position >= self._session.capacity
        return "length" if enough or full else None

    def _emit(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._outbox.append(text)

    def _close(self, reason: FinishReason) -> None:
        """Show what was held back, and make the result."""
        rest, stopped = self._stops.push(self._streamer.finish())
        self._emit(rest)
        if stopped and reason == "length":
            reason = "stop"
        elif not stopped:
            self._emit(self._stops.flush())
        held = self._session.position - self._start - len(self._prompt)
        if held < 0 and self._session.position > self._start:
            # The prompt went in by half. It is taken back, so that the caller knows what is held.
            self._session.rewind(self._start)
        self._result = GenerationResult(
            text="".join(self._pieces),
            tokens=tuple(self._tokens),
            prompt_tokens=len(self._prompt),
            finish_reason=reason,
            fed=min(max(held, 0), len(self._tokens)),
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
            time_to_first_token_s=self._first_token_s,
            logprobs=tuple(self._logprobs),
        )


def check_fits(session: SessionLike, count: int) -> None:
    """Raise ContextLengthError, with both numbers, unless `count` more tokens fit the session."""
    free = session.capacity - session.position
    if count <= free:
        return
    if session.position == 0:
        held = f"the prompt has {count} tokens, and the context holds {session.capacity}"
        if getattr(session, "could_be_larger", True):
            advice = "shorten the prompt, or compile the model with a larger --context"
        else:
            advice = "shorten the prompt: that is the most that the model was made for"
        raise ContextLengthError(f"{held}; {advice}")
    raise ContextLengthError(
        f"the prompt adds {count} tokens to the {session.position} of the conversation, together "
        f"{session.position + count}, and the context holds {session.capacity}; shorten the prompt "
        "or reset the conversation"
    )


def generate_stream(
    session: SessionLike,
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int | None = None,
    sampling: SamplingOptions | None = None,
    stops: Sequence[str] | str = (),
    eos_ids: Collection[int] | None = None,
    history: Sequence[int] = (),
    on_token: Callable[[int], object] | None = None,
    top_logprobs: int | None = None,
    on_logprobs: Callable[[TokenLogprobs], object] | None = None,
) -> Generation:
    """Start a generation after `prompt_ids`, which are fed at the session's position.

    max_tokens: the most tokens to sample; 0 only feeds the prompt; None goes on until an EOS or the
    end of the context. sampling: greedy when None. stops: strings that end the answer and are not
    shown; the text of a special token ends it at that token. eos_ids: the tokenizer's when None.
    history: the tokens that the session holds already, for the repetition penalty. on_token: called
    with every sampled id, EOS included. top_logprobs: note every sampled token's log-probability,
    and those of so many likeliest ones, in the result. on_logprobs: called with each.

    Everything is checked here, before the session is touched: UsageError for a bad option or an
    empty prompt, ContextLengthError for a prompt that doesn't fit.
    """
    if max_tokens is not None:
        max_tokens = checked_whole("max_tokens", max_tokens)
    if top_logprobs is not None:
        top_logprobs = checked_whole("top_logprobs", top_logprobs)
    if isinstance(prompt_ids, Sequence) and not len(prompt_ids):
        raise UsageError("the prompt has no tokens; give it some text")
    ids = checked_ids(prompt_ids).tolist()
    matcher = StopMatcher(stops)
    texts = [stops] if isinstance(stops, str) else list(stops)
    marks = {tokenizer.token_id(text) for text in texts}
    special = {i for i in marks if i is not None and tokenizer.is_special(i)}
    sampler = Sampler(sampling or SamplingOptions(), tokenizer.vocab_size, tokenizer.missing_ids)
    check_fits(session, len(ids))
    return Generation(
        session,
        tokenizer,
        ids,
        max_tokens=max_tokens,
        sampler=sampler,
        stops=matcher,
        eos_ids=frozenset(tokenizer.eos_ids if eos_ids is None else eos_ids) | special,
        history=history,
        on_token=on_token,
        top_logprobs=top_logprobs,
        on_logprobs=on_logprobs,
    )
