"""The standalone runner of an artifact: `run`, one executable, and `tokenizer.bin` beside it.

It is the model's code, the C API of `native/` and the text part of `native/runner/`, linked into a
program that needs libc, libm and libpthread (macOS: libSystem), or with `static` nothing at all. It
knows the weight
file and the tokenizer file that it was made with.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bessemer
from bessemer.artifact.text.build import check_convertible, write_tokenizer_file
from bessemer.errors import UnsupportedError
from bessemer.runtime.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bessemer.backend.target import Target

RUNNER_FILE = "run"

log = logging.getLogger(__name__)


def check_source(checkpoint: Any) -> None:
    """Raise UnsupportedError unless the tokenizer of a checkpoint can be a tokenizer file: asked
    before minutes of work.
    """
    if not getattr(checkpoint, "has_tokenizer", lambda: False)():
        raise UnsupportedError(
            "--runner: the model comes without a tokenizer, which the standalone runner needs"
        )
    with tempfile.TemporaryDirectory(prefix="bessemer-") as name:
        checkpoint.write_tokenizer(Path(name))
        check_convertible(Tokenizer.load(name))


def runner_target(target: Target, static: bool) -> Target:
    """What the runner's C is compiled for. Raises UsageError for a static program where there is
    no such thing.
    """
    from bessemer.errors import UsageError

    if not static:
        return target
    if target.system != "linux":
        raise UsageError(f"--static: a program for {target.system} always needs its system library")
    return replace(target, triple=f"{target.arch}-unknown-linux-musl")


@dataclass(frozen=True)
class Runner:
    """Makes the runner. static: without any shared library, with musl. work: a folder for what lies
    between.
    """

    target: Target
    static: bool
    work: Path

    def write(self, code: Sequence[Path], description: Path, folder: Path) -> None:
        """Put `run` and tokenizer.bin into an artifact whose tokenizer files are written.

        code: the model's own objects.  description: the object of the model's constants.
        Raises CompileError, and NotConvertible for a tokenizer that the runner can't have.
        """
        from bessemer.backend.link import (
            compile_api,
            compile_c,
            compile_native,
            compile_runner,
            link_program,
        )
        from bessemer.native import FOLDER

        written = write_tokenizer_file(folder)
        if written.note:
            log.warning("%s", written.note)
        target = runner_target(self.target, self.static)
        objects = self.work / "runner"
        objects.mkdir(parents=True, exist_ok=True)
        identity = objects / "identity.c"
        identity.write_text(
            '#include "runner/runner.h"\n'
            f"const uint32_t bsm_runner_tokenizer = {written.checksum}u;\n"
            f'const char bsm_runner_version[] = "{bessemer.__version__}";\n',
            encoding="utf-8",
        )
        compile_c(identity, identity.with_suffix(".o"), target, [f"-I{FOLDER}"])
        native = [
            *compile_native(target, objects),
            *compile_api(target, objects),
            *compile_runner(target, objects),
        ]
        out = folder / RUNNER_FILE
        link_program(
            [*code, description, *native, identity.with_suffix(".o")], out, target, self.static
        )
        out.chmod(0o755)
