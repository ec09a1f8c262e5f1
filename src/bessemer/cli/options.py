"""Options that several verbs share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, Token

from bessemer.arguments import checked_path, checked_whole
from bessemer.compile_options import CompileOptions
from bessemer.errors import UsageError

if TYPE_CHECKING:
    from bessemer.runtime.model import Model as RuntimeModel

MODEL_HELP = "A folder, a .gguf file, a hub name (owner/name), an alias, or a compiled folder."

Model = Annotated[str, Parameter(help=MODEL_HELP, allow_leading_hyphen=True)]
Json = Annotated[bool, Parameter(help="Print one JSON object.")]


def whole(kind: object, tokens: Sequence[Token]) -> int:
    """A whole number as it is written; the parser's own way would round it."""
    try:
        return int(tokens[0].value)
    except ValueError:
        raise ValueError(f"{tokens[0].value!r} is no whole number") from None


Threads = Annotated[
    int | None,
    Parameter(
        converter=whole,
        help="Threads; the cores that this process may use by default.",
    ),
]
Text = Parameter(allow_leading_hyphen=True)


@Parameter(name="*")
@dataclass
class StorageOptions:
    """How a model is compiled when it isn't yet."""

    weights: Annotated[
        str | None,
        Parameter(
            help="Storage of the weights: f32, f16, bf16 or q8_0 (8 bits; also called w8a32, "
            "w8a16, w8a8; activations then are 16-bit integers by blocks of 32). Default: q8_0 for "
            "a checkpoint that is quantised itself, else f16."
        ),
    ] = None
    kv: Annotated[str, Parameter(help="Storage of the KV cache: f32 or f16.")] = "f16"
    context: Annotated[
        int | None,
        Parameter(
            converter=whole, help="Tokens of a session (default: the model's own, at most 4096)."
        ),
    ] = None
    low_precision: Annotated[
        bool,
        Parameter(
            negative="",
            help="Round caches and index keys as in the model's training (DeepSeek V4).",
        ),
    ] = False

    def compile_options(self, **others: Any) -> CompileOptions:
        return CompileOptions(
            self.weights, self.kv, self.context, low_precision=self.low_precision, **others
        )


@Parameter(name="*")
@dataclass
class SteeringArguments:
    """Moving the outputs of every layer along a direction."""

    steering: Annotated[
        Path | None,
        Parameter(help="A file of directions: a row of float32 for each layer."),
    ] = None
    steering_attn: Annotated[
        float | None,
        Parameter(help="How much of the direction is taken out of attention outputs (default 0)."),
    ] = None
    steering_ffn: Annotated[
        float | None,
        Parameter(help="How much is taken out of feed-forward outputs (default 0)."),
    ] = None

    @property
    def is_given(self) -> bool:
        """Raises UsageError for scales without a file or beyond what makes sense, and for a file
        that can't be read.
        """
        if self.steering is None and (self.steering_attn, self.steering_ffn) != (None, None):
            raise UsageError("--steering-attn and --steering-ffn need --steering FILE")
        if self.steering is None:
            return False
        from bessemer.steering import check_readable, check_scales

        check_scales(self.steering_attn or 0.0, self.steering_ffn or 0.0)
        check_readable(self.steering)
        return True

    def apply(self, model: RuntimeModel) -> None:
        """Let the sessions of a model be steered so."""
        if self.steering is not None:
            directions = model.read_directions(self.steering)
            model.steer(
                directions, attention=self.steering_attn or 0.0, ffn=self.steering_ffn or 0.0
            )


@Parameter(name="*")
@dataclass
class SamplingArguments:
    """How tokens are chosen, and where the answer ends."""

    max_tokens: Annotated[
        int, Parameter(converter=whole, help="The most tokens of the answer.")
    ] = 512
    temperature: Annotated[float, Parameter(help="0 takes the most likely token.")] = 0.0
    top_k: Annotated[
        int, Parameter(converter=whole, help="Sample among the k likeliest; 0 or -1: all.")
    ] = 0
    top_p: Annotated[float, Parameter(help="Sample among the likeliest of this mass.")] = 1.0
    min_p: Annotated[
        float, Parameter(help="Leave out what is less likely than this share of the likeliest.")
    ] = 0.0
    repeat_penalty: Annotated[float, Parameter(help="Above 1: repeat less.")] = 1.0
    seed: Annotated[int | None, Parameter(converter=whole, help="Makes sampling repeatable.")] = (
        None
    )
    stop: Annotated[
        list[str],
        Parameter(
            help="End the answer before this text; may be repeated.", allow_leading_hyphen=True
        ),
    ] = field(default_factory=list)

    def keywords(self) -> dict[str, Any]:
        """As `Model.stream` takes them, and checked: a model may have to be compiled first."""
        from bessemer.runtime.sampling import SamplingOptions
        from bessemer.runtime.stops import StopMatcher

        for text in self.stop:
            if not checked_text("--stop", text):
                raise UsageError("--stop '': it must be some text")
        values = dict(vars(self))
        StopMatcher(self.stop)
        checked_whole("max_tokens", self.max_tokens)
        SamplingOptions(**{k: v for k, v in values.items() if k not in ("max_tokens", "stop")})
        return values


def whole_numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    """The numbers of a list by comma, each at least `least`."""
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = (least - 1,)
    if text and not found:
        raise UsageError(f"{option} {text}: there is no number; whole numbers from {least}")
    if any(number < least for number in found):
        raise UsageError(f"{option} {text}: whole numbers from {least}, separated by commas")
    return found


def checked_text(what: str, text: str) -> str:
    """A text of the command line or a terminal. UsageError when its bytes were not UTF-8, which
    Python passes on as lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = len(os.fsencode(text[: error.start]))
        raise UsageError(f"{what} is not UTF-8 text (byte {at})") from None
    return text


TOP_LOGPROBS = 5

# Of a prompt: more than any context holds, and few enough to be read before that is found.
MOST_BYTES = 64 << 20


@Parameter(name="*")
@dataclass
class DumpArguments:
    """What is shown beside the answer, or in its place."""

    dump_tokens: Annotated[
        bool,
        Parameter(
            help="Print the token ids of the prompt, after the chat template, with their texts; "
            "nothing is generated."
        ),
    ] = False
    dump_logprobs: Annotated[
        str | None,
        Text,
        Parameter(
            help="Write a line of JSON for each token of the answer to this file: id, text, its "
            "natural log-probability by the raw logits, and the likeliest tokens."
        ),
    ] = None
    top_logprobs: Annotated[
        int | None,
        Parameter(converter=whole, help=f"How many likeliest tokens (default {TOP_LOGPROBS})."),
    ] = None
    diagnose: Annotated[
        Literal["first-token"] | None,
        Parameter(
            help="Run the whole network on the first token of the prompt (on BOS without one), "
            "without a cache, and print each stage's norm and hash."
        ),
    ] = None

    def check(self) -> None:
        """Raise UsageError for options that exclude each other."""
        if self.dump_logprobs == "-":
            raise UsageError("--dump-logprobs -: name a file; standard output is the answer's")
        if self.top_logprobs is not None and self.dump_logprobs is None:
            raise UsageError("--top-logprobs needs --dump-logprobs FILE")
        if self.top_logprobs is not None:
            checked_whole("top_logprobs", self.top_logprobs)
        alone = {
            "--dump-tokens": self.dump_tokens,
            "--dump-logprobs": self.dump_logprobs is not None,
            "--diagnose": self.diagnose is not None,
        }
        given = [name for name, is_given in alone.items() if is_given]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are different runs; give one of them")

    @property
    def log_probabilities(self) -> int | None:
        """How many likeliest tokens are dumped; None when nothing is."""
        if self.dump_logprobs is None:
            return None
        return TOP_LOGPROBS if self.top_logprobs is None else self.top_logprobs


def read_text(prompt: str | None, file: str | None) -> str:
    """The text of `-p`, of `-f FILE` or of standard input (`-f -`, or nothing given).

    One line end at the end of a file or of standard input doesn't belong to the text.
    """
    import sys

    if prompt is not None and file is not None:
        raise UsageError("give either -p TEXT or -f FILE")
    if prompt is not None:
        return checked_text("the prompt", prompt)
    if file is None and sys.stdin.isatty():
        raise UsageError("there is no prompt: give -p TEXT, -f FILE, or text on standard input")
    where = "standard input" if file in (None, "-") else str(file)
    try:
        if file is None or file == "-":
            data = sys.stdin.buffer.read(MOST_BYTES + 1)
        else:
            with checked_path("file", file).open("rb") as stream:
                data = stream.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UsageError(f"{where} has more than {MOST_BYTES >> 20} MiB; no context holds it")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{where} can't be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text (byte {error.start})") from None
    return text.removesuffix("\n").removesuffix("\r")
