"""`bessemer run`: one prompt, one answer."""

from __future__ import annotations

import contextlib
import json as json_format
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from bessemer.arguments import checked_path
from bessemer.cli import interrupt
from bessemer.cli.line_file import LineFile
from bessemer.cli.options import (
    DumpArguments,
    Json,
    Model,
    SamplingArguments,
    SteeringArguments,
    StorageOptions,
    Text,
    Threads,
    checked_text,
    read_text,
)
from bessemer.cli.outputs import STDIN, check_output, loaded_inputs, model_inputs
from bessemer.cli.prompts import Request, dump_tokens
from bessemer.errors import UsageError

if TYPE_CHECKING:
    from bessemer import runtime
    from bessemer.runtime.generate import GenerationResult
    from bessemer.runtime.model import Stream


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
    dumps: DumpArguments | None = None,
    steering: SteeringArguments | None = None,
    threads: Threads = None,
    json: Json = False,
) -> int:
    """Answer one prompt.

    The answer streams to standard output, and a line of statistics to standard error. A model that
    is not compiled yet is compiled into the cache first.
    """
    dumps, storage = dumps or DumpArguments(), storage or StorageOptions()
    dumps.check()
    if dumps.diagnose is not None:
        from bessemer.cli.diagnose import diagnose_first_token

        if steering is not None and steering.is_given:
            raise UsageError("--diagnose runs the network as it is; leave out --steering")
        stated = prompt is not None or file is not None
        asked = _request(prompt, file, system, raw) if stated else None
        return diagnose_first_token(model, asked, storage, threads, json=json)
    request = _request(prompt, file, system, raw)
    if dumps.dump_tokens:
        return dump_tokens(model, request, json=json)
    options = (sampling or SamplingArguments()).keywords()
    with contextlib.ExitStack() as open_files:
        lines = None
        if dumps.dump_logprobs is not None:  # before minutes of work: may it be written?
            path = checked_path("dump_logprobs", dumps.dump_logprobs)
            check_output("--dump-logprobs", path, _inputs(model, prompt, file, steering))
            lines = open_files.enter_context(LineFile(path))
        loaded = load_model(model, storage, threads, steering)
        if lines is not None:
            check_output("--dump-logprobs", lines.path, loaded_inputs(loaded.model))
            options |= _logprobs_options(dumps, lines)
        stream = _start(loaded.model, request, options)
        if lines is not None:
            lines.clear()  # not before the prompt is accepted
        return _answer(stream, loaded, json=json)


def _request(prompt: str | None, file: str | None, system: str | None, raw: bool) -> Request:
    """What is asked, checked."""
    if system is not None:
        checked_text("--system", system)
        if raw:
            raise UsageError("--system needs the chat template; leave out --raw")
    request = Request(read_text(prompt, file), system, raw)
    if not raw and not request.text.strip():
        raise UsageError("the prompt is empty")
    return request


def _inputs(
    model: str, prompt: str | None, file: str | None, steering: SteeringArguments | None
) -> dict[str, Path | int]:
    """What the call reads, as far as it is known before the model is found."""
    inputs = model_inputs(model, steering)
    if file is not None and file != "-":
        inputs["the file of the prompt"] = checked_path("file", file)
    elif prompt is None:
        inputs["standard input"] = STDIN
    return inputs


def _logprobs_options(dumps: DumpArguments, lines: LineFile) -> dict[str, Any]:
    """Options of a generation that writes the log-probabilities of its tokens."""
    return {
        "top_logprobs": dumps.log_probabilities,
        "on_logprobs": lambda found: lines.write(found.to_json()),
    }


def _start(model: runtime.model.Model, request: Request, options: dict[str, Any]) -> Stream:
    if request.raw:
        return model.stream(request.text, **options)
    return model.stream_chat(request.messages, **options)


def _answer(stream: Stream, loaded: Loaded, *, json: bool) -> int:
    """Show the pieces as they come, and what is to be said at the end."""
    show = None if json else sys.stdout
    try:
        for piece in stream:
            if show is not None:
                show.write(piece)
                show.flush()
    except KeyboardInterrupt:  # between two steps: what is there is shown all the same
        _cancel(stream)
    result = stream.result
    if show is None:
        interrupt.owe_nothing()
        print(json_format.dumps(report(result, loaded), ensure_ascii=False))
    else:
        print(flush=True)
        print(statistics(result), file=sys.stderr)
    return interrupt.EXIT_INTERRUPTED if result.finish_reason == "cancelled" else 0


def _cancel(stream: Stream) -> None:
    """End an answer, however often Ctrl-C is pressed meanwhile."""
    while True:
        try:
            stream.cancel()
            stream.complete()
            return
        except KeyboardInterrupt:
            continue


@dataclass(frozen=True)
class Loaded:
    """A model that is ready, and the seconds that loading and compiling took."""

    model: runtime.model.Model
    load_seconds: float
    compile_seconds: float


def load_model(
    name: str,
    storage: StorageOptions,
    threads: int | None,
    steering: SteeringArguments | None = None,
) -> Loaded:
    """Find or compile a model, and load it with its tokenizer."""
    from bessemer.api import prepare
    from bessemer.artifact.manifest import is_artifact
    from bessemer.cli.compile import announce_wait
    from bessemer.cli.progress import StageProgress
    from bessemer.runtime.engine import check_threads
    from bessemer.runtime.model import Model as RuntimeModel

    check_threads(threads)  # before minutes of work
    steering = steering or SteeringArguments()
    # A compiled folder is taken as it is: if it can't be steered, its model says so.
    steerable = {"steering": True} if steering.is_given and not is_artifact(Path(name)) else {}
    options = storage.compile_options(**steerable)
    with StageProgress() as progress:
        prepared = prepare(name, options, progress=progress, waiting=announce_wait)
    began = time.monotonic()
    model = RuntimeModel(prepared.artifact, threads)
    steering.apply(model)
    pool = ThreadPoolExecutor(1)  # the weights come in while the tokenizer is built
    try:
        tokenizer = pool.submit(lambda: model.tokenizer)
        model.engine  # noqa: B018
        tokenizer.result()
    finally:
        # Ctrl-C may leave a module's import lock held, for which the other thread waits for ever.
        pool.shutdown(wait=False)
    return Loaded(model, time.monotonic() - began, prepared.compile_seconds)


def report(result: GenerationResult, loaded: Loaded) -> dict[str, Any]:
    """The object that `--json` prints; `interrupt.NO_ANSWER` is the one without a result."""
    first = result.time_to_first_token_s
    return {
        "text": result.text,
        "token_ids": list(result.tokens),
        "tokens": len(result.tokens),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "interrupted": result.finish_reason == "cancelled",
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
