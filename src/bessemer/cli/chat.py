"""`bessemer chat`: a conversation."""

from __future__ import annotations

import contextlib
import json as json_format
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bessemer.arguments import checked_path
from bessemer.cli.options import (
    Model,
    SamplingArguments,
    SteeringArguments,
    StorageOptions,
    Text,
    Threads,
    checked_text,
)
from bessemer.cli.outputs import Inputs, check_output, loaded_inputs, model_inputs
from bessemer.cli.run import load_model, statistics
from bessemer.errors import BessemerError, UsageError
from bessemer.whole_file import write_whole

if TYPE_CHECKING:
    from bessemer.runtime.conversation import Conversation
    from bessemer.runtime.generate import GenerationResult

HELP = """\
/help          this text
/system TEXT   tell the model something before everything, and begin anew; alone: show it
/reset         forget the conversation
/stats         tokens and speeds
/save FILE     write the conversation to a file, as JSON
/quit          leave (so does the end of the input)
Ctrl-C stops an answer."""


def chat(
    model: Model,
    /,
    *,
    system: Annotated[
        str | None, Text, Parameter(help="What the model is told before everything.")
    ] = None,
    sampling: SamplingArguments | None = None,
    storage: StorageOptions | None = None,
    steering: SteeringArguments | None = None,
    threads: Threads = None,
) -> int:
    """Talk to a model.

    Reads questions line by line, from a terminal or a pipe; /help lists the commands. The
    conversation stays in the KV cache: a turn costs what is new in it.
    """
    from bessemer.runtime.conversation import Conversation

    if system is not None:
        checked_text("--system", system)
    options = (sampling or SamplingArguments()).keywords()
    loaded = load_model(model, storage or StorageOptions(), threads, steering)
    conversation = Conversation(loaded.model, system)
    # Fails now, not after the first question, when there is no template.
    loaded.model.encode_chat([*conversation.messages, {"role": "user", "content": "?"}])
    reads = model_inputs(model, steering) | loaded_inputs(loaded.model)
    chatting = Chat(conversation, options, reads)
    if chatting.terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - line editing and history for input()
        say(f"{loaded.model.name}, {loaded.model.context_length} tokens of context; /help for help")
    while not chatting.over:
        line = chatting.read_line()
        if line is None:
            break
        chatting.handle(line)
    # At a terminal an error was seen and answered; a script has nothing but the exit code.
    return 1 if chatting.failed and not chatting.terminal else 0


def say(message: str) -> None:
    """Something that isn't the model's."""
    print(message, file=sys.stderr, flush=True)


@dataclass
class Chat:
    """The loop's state. options: keywords of `Conversation.ask`.  reads: what /save must spare."""

    conversation: Conversation
    options: dict
    reads: Inputs = field(default_factory=dict)
    results: list[GenerationResult] = field(default_factory=list)
    over: bool = False
    lines: int = 0
    failed: bool = False

    def __post_init__(self) -> None:
        self.terminal = sys.stdin.isatty()
        self.commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: say(HELP),
            "/system": self.set_system,
            "/reset": self.reset,
            "/stats": self.stats,
            "/save": self.save,
            "/quit": self.quit,
            "/exit": self.quit,
        }

    def read_line(self) -> str | None:
        """The next line without its end, or None at the end of the input. A line that is no text
        is told and passed over: an answer to something else than was asked helps nobody.
        """
        while True:
            try:
                if self.terminal:
                    return checked_text("the line", input("> "))
                line = sys.stdin.buffer.readline()
                self.lines += 1
                return line.decode("utf-8-sig").rstrip("\r\n") if line else None
            except EOFError:
                say("")
                return None
            except UnicodeDecodeError as error:
                where = "the line" if self.terminal else f"line {self.lines} of standard input"
                self.fail(f"{where} is not UTF-8 text (byte {error.start})")
            except UsageError as error:
                self.fail(str(error))
            except KeyboardInterrupt:
                if not self.terminal:
                    raise
                say("\n(/quit or Ctrl-D leaves)")

    def handle(self, line: str) -> None:
        """A command, or a question."""
        if not line.strip():
            return
        word, _, rest = line.strip().partition(" ")
        try:
            if word in self.commands:
                self.commands[word](rest.strip())
            elif word.startswith("/") and word[1:].isalpha():
                say(f"there is no command {word}; /help lists them")
            else:
                self.ask(line)
        except BessemerError as error:
            self.fail(str(error))

    def fail(self, message: str) -> None:
        """Tell an error; the conversation goes on."""
        self.failed = True
        say(f"bessemer: error: {message}")

    def ask(self, text: str) -> None:
        """Answer a question; Ctrl-C ends the answer and nothing else."""
        answer = self.conversation.ask(text, **self.options)
        try:
            for piece in answer:
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:  # between two steps
            answer.cancel()
            answer.complete()
        result = answer.result
        self.results.append(result)
        print(flush=True)
        if result.finish_reason == "cancelled":
            say("(stopped)")
        elif result.finish_reason == "length":
            say("(cut off: --max-tokens or the context is reached)")

    def set_system(self, text: str) -> None:
        if text:
            self.conversation.system = text
            say("the conversation begins anew")
        else:
            say(self.conversation.system or "(there is no system text)")

    def reset(self, rest: str) -> None:
        self.conversation.reset()
        say("the conversation begins anew")

    def stats(self, rest: str) -> None:
        session = self.conversation.session
        say(f"{session.position} of {session.capacity} tokens of context are in use")
        if self.results:
            say(f"last: {statistics(self.results[-1]).removeprefix('bessemer: ')}")
            tokens = sum(len(r.tokens) for r in self.results)
            say(f"{len(self.results)} answers, {tokens} tokens")

    def save(self, name: str) -> None:
        if not name:
            say("give a file: /save FILE")
            return
        content = {"model": self.conversation.model.name, "messages": self.conversation.messages}
        text = json_format.dumps(content, indent=2, ensure_ascii=False) + "\n"
        try:
            path = checked_path("the file", name)
            check_output("/save", path, self.reads)
            _write(path, text)
        except OSError as error:
            raise UsageError(f"{name} can't be written: {error.strerror or error}") from None
        say(f"saved to {name}")

    def quit(self, rest: str) -> None:
        self.over = True


def _write(path: Path, text: str) -> None:
    """Write a file, whole or not at all, or into a pipe or a terminal."""
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
    else:
        write_whole(path, [text.encode()])
