"""`bessemer run`: one prompt, one answer."""

from __future__ import annotations

import json as json_format
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bessemer.cli.options import (
    Json,
    Model,
    SamplingArguments,
    StorageOptions,
    Text,
    Threads,
    checked_text,
    read_text,
)
from bessemer.errors import UsageError

if TYPE_CHECKING:
    from bessemer import runtime
    from bessemer.runtime.generate import GenerationResult

EXIT_INTERRUPTED = 130


def run(
    model: Model,
    /,
    *,
    prompt: Annotated[
        str | None, Text, Parameter(name=["--prompt", "-p"], help="The prompt.")
    ] = None,
    file: Annotated[
        str | None,
        Text,
        Parameter(name=["--file", "-f"], help="Read the prompt from a file; - is standard input."),
    ] = None,
    system: Annotated[
        str | None, Text, Parameter(help="What the model is told before the prompt.")
    ] = None,
    raw: Annotated[
        bool, Parameter(help="Continue the text as it is, without the chat template.")
    ] = False,
    sampling: SamplingArguments | None = None,
    storage: StorageOptions | None = None,
    threads: Threads = None,
    json: Json = False,
) -> int:
    """Answer one prompt.

    The answer streams to standard output, and a line of statistics to standard error. A model that
    is not compiled yet is compiled into the cache first.
    """
    if system is not None:
        if raw:
            raise UsageError("--system needs the chat template; leave out --raw")
        checked_text("--system", system)
    text = read_text(prompt, file)
    if not raw and not text.strip():
        raise UsageError("the prompt is empty")
    options = (sampling or SamplingArguments()).keywords()
    loaded = load_model(model, storage or StorageOptions(), threads)
    if raw:
        stream = loaded.model.stream(text, **options)
    else:
        messages = [] if system is None else [{"role": "system", "content": system}]
        stream = loaded.model.stream_chat([*messages, {"role": "user", "content": text}], **options)
    show = None if json else sys.stdout
    try:
        for piece in stream:
            if show is not None:
                show.write(piece)
                show.flush()
    except KeyboardInterrupt:  # between two steps: what is there is shown all the same
        stream.cancel()
        stream.complete()
    result = stream.result
    if show is None:
        print(json_format.dumps(report(result, loaded), ensure_ascii=False))
    else:
        print(flush=True)
        print(statistics(result), file=sys.stderr)
    return EXIT_INTERRUPTED if result.finish_reason == "cancelled" else 0


@dataclass(frozen=True)
class Loaded:
    """A model that is ready, and the seconds that loading and compiling took."""

    model: runtime.model.Model
    load_seconds: float
    compile_seconds: float


def load_model(name: str, storage: StorageOptions, threads: int | None) -> Loaded:
    """Find or compile a model, and load it with its tokenizer."""
    from bessemer.api import prepare
    from bessemer.cli.compile import announce_wait
    from bessemer.cli.progress import StageProgress
    from bessemer.runtime.model import Model as RuntimeModel

    with StageProgress() as progress:
        prepared = prepare(
            name, storage.compile_options(), progress=progress, waiting=announce_wait
        )
    began = time.monotonic()
    model = RuntimeModel(prepared.artifact, threads)
    with ThreadPoolExecutor(1) as pool:  # the weights come in while the tokenizer is built
        tokenizer = pool.submit(lambda: model.tokenizer)
        model.engine  # noqa: B018
        tokenizer.result()
    return Loaded(model, time.monotonic() - began, prepared.compile_seconds)


def report(result: GenerationResult, loaded: Loaded) -> dict[str, Any]:
    """The object that `--json` prints."""
    first = result.time_to_first_token_s
    return {
        "text": result.text,
        "tokens": len(result.tokens),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "prefill_tokens_per_second": round(result.prefill_tokens_per_second, 2),
        "decode_tokens_per_second": round(result.decode_tokens_per_second, 2),
        "time_to_first_token_s": None if first is None else round(first, 4),
        "load_s": round(loaded.load_seconds, 4),
        "compile_s": round(loaded.compile_seconds, 3),
    }


def statistics(result: GenerationResult) -> str:
    """One line about a generation."""
    parts = [f"{result.prompt_tokens} prompt tokens"]
    if result.prefill_s > 0:
        parts[0] += f" at {result.prefill_tokens_per_second:.1f}/s"
    parts.append(f"{len(result.tokens)} tokens")
    if result.decode_s > 0:
        parts[1] += f" at {result.decode_tokens_per_second:.1f}/s"
    if result.time_to_first_token_s is not None:
        parts.append(f"first after {result.time_to_first_token_s:.2f} s")
    return f"bessemer: {', '.join(parts)} ({result.finish_reason})"
