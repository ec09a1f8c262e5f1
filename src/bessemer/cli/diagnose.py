"""`bessemer run --diagnose first-token`: each stage of the network on one token."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING

from bessemer.errors import UsageError

if TYPE_CHECKING:
    from bessemer.artifact.reader import Artifact
    from bessemer.cli.options import StorageOptions
    from bessemer.cli.prompts import Request
    from bessemer.verify.first_token import Diagnosis, Stage

EXIT_PARTING = 1
# Digits of a hash in the table; --json has all of them.
SHOWN_DIGITS = 8


def diagnose_first_token(
    name: str,
    request: Request | None,
    storage: StorageOptions,
    threads: int | None,
    *,
    json: bool,
) -> int:
    """Print the stages of the first token of a prompt, or of BOS without one; 1 when compiled code
    and reference part.
    """
    from bessemer.api import prepare
    from bessemer.cli.compile import announce_wait
    from bessemer.cli.progress import StageProgress
    from bessemer.runtime.engine import check_threads
    from bessemer.verify.first_token import diagnose_first_token as diagnose

    check_threads(threads)
    with StageProgress() as progress:
        prepared = prepare(
            name, storage.compile_options(), progress=progress, waiting=announce_wait
        )
        token, text = _first_token(prepared.artifact, request)
        diagnosis = diagnose(prepared.artifact, token, threads=threads, progress=progress)
    if json:
        data = {**diagnosis.to_json(), "text": text}
        print(json_format.dumps(data, ensure_ascii=False, allow_nan=False))
    else:
        print(table(diagnosis, text), end="")
    return 0 if diagnosis.parting is None else EXIT_PARTING


def _first_token(artifact: Artifact, request: Request | None) -> tuple[int, str]:
    """Its id and text."""
    from bessemer.runtime.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(artifact.folder)
    if request is not None:
        ids = request.ids(tokenizer)
        if not ids:
            raise UsageError("the prompt has no tokens; give it some text")
        token = ids[0]
    elif tokenizer.bos_id is not None:
        token = tokenizer.bos_id
    else:
        raise UsageError("the model has no token that begins a text; give -p TEXT or -f FILE")
    return token, tokenizer.token_text(token)


def table(diagnosis: Diagnosis, text: str) -> str:
    """One line for each stage, and what they come to."""
    from bessemer.inspect.page import columns

    head: list[object] = ["layer", "stage", "of", "values"]
    rows = [[*head, "norm", "hash", "compiled norm", "hash", "difference", ""]]
    for stage in diagnosis.stages:
        layer = "-" if stage.layer is None else stage.layer
        line: list[object] = [layer, stage.name, stage.of, "x".join(map(str, stage.shape))]
        for numbers in (stage.reference, stage.compiled):
            if numbers is None:
                line += ["", ""]
            else:
                line += [f"{numbers.norm:.6g}", numbers.digest[:SHOWN_DIGITS]]
        line.append("" if stage.error is None else f"{stage.error:.1e}")
        line.append("<" if diagnosis.parts(stage) else "")
        rows.append(line)
    shown = json_format.dumps(text, ensure_ascii=False)
    title = f"{diagnosis.model}: token {diagnosis.token} {shown} at position 0, without a cache\n\n"
    body = columns(rows, right=(0, 3, 4, 6, 8))
    return title + body + "\n" + _summary(diagnosis)


def _summary(diagnosis: Diagnosis) -> str:
    lines = [diagnosis.note] if diagnosis.note else []
    errors = [(s.error, s) for s in diagnosis.stages if s.error is not None]
    bound = f"at most {diagnosis.tolerance:.0e}"
    parting = diagnosis.parting
    if parting is not None:
        lines.append(
            f"compiled code and reference part at {_place(parting)}: relative L2 "
            f"{parting.error:.1e} ({bound})"
        )
    else:
        worst, stage = max(errors, key=lambda pair: pair[0])
        lines.append(
            f"compiled code and reference agree: relative L2 {worst:.1e} ({bound}), the largest at "
            f"{_place(stage)}"
        )
    return "".join(f"{line}\n" for line in lines)


def _place(stage: Stage) -> str:
    where = "" if stage.layer is None else f"layer {stage.layer}, "
    return f"{where}{stage.name} ({stage.of})"
