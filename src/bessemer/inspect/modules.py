"""Stages `mlir`, `llvm` and `asm`: the code of each module, whole or of one function."""

from __future__ import annotations

import re
from collections.abc import Callable

from bessemer.errors import UsageError
from bessemer.inspect.page import Page
from bessemer.inspect.subject import Subject

# Of MLIR: what code generation emits; the groups as linalg on tensors; and what the backend makes
# of the first on its way to LLVM's dialect.
LOWERED_FORMS = ("bufferized", "loops", "math", "llvm")
FORMS = ("kernel", "payload", *LOWERED_FORMS)
_COMMENT = {"mlir": "//", "llvm": ";", "asm": "#"}
_EXTENSION = {"mlir": "mlir", "llvm": "ll", "asm": "s"}


def code(
    subject: Subject, stage: str, module: str | None, group: str | None, form: str = "kernel"
) -> Page:
    """The text of all modules, of one, or of one function in them.

    form: one of FORMS; all but "kernel" are of MLIR only.
    Raises UsageError for a module or a function that isn't there.
    """
    if form not in FORMS:
        raise UsageError(f"--form {form}: choose one of {', '.join(FORMS)}")
    if stage != "mlir" and form != "kernel":
        raise UsageError(f"--form {form}: only the stage mlir has other forms")
    if form == "payload":
        return _payloads(subject, group)
    stems = subject.modules()
    if module is not None and module not in stems:
        raise UsageError(f"--module {module}: there are {', '.join(stems)}")
    texts = {}
    for stem in [module] if module else _likely(stems, group):
        text = _lowered(subject, stem, form) if form != "kernel" else _text(subject, stage, stem)
        if group is not None:
            found = _EXTRACT[stage](text, group)
            if found:
                texts[stem] = found
        else:
            texts[stem] = text
    if group is not None and not texts:
        raise UsageError(f"--group {group}: no such function; see `inspect MODEL groups`")
    mark = _COMMENT[stage]
    whole = "".join(f"{mark} module {stem}\n{text}\n" for stem, text in texts.items())
    return Page(whole, texts)


def _likely(stems: list[str], group: str | None) -> list[str]:
    """The modules that can define a function: `decode_linear_0` is one of groups_decode. Compiling
    the others only to look into them would take long.
    """
    suffix = (group or "").split("_", 1)[0]
    named = [s for s in stems if s == f"groups_{suffix}"]
    return named or stems


def _text(subject: Subject, stage: str, stem: str) -> str:
    kept = subject.kept(f"ir/{stem}.{_EXTENSION[stage]}")
    if kept is not None:
        return kept
    if stage == "mlir":
        return subject.compilation.generated.modules[stem]
    compiled = subject.compiled(stem, assembly=stage == "asm")
    return str(compiled.assembly) if stage == "asm" else compiled.llvm_ir


def _lowered(subject: Subject, stem: str, form: str) -> str:
    """A module on its way through the backend."""
    from bessemer.backend.pipeline import lower

    compilation = subject.compilation
    dump: dict[str, str] = {}
    lower(compilation.generated.modules[stem], compilation.target, stem, dump=dump)
    return dump[form]


def _payloads(subject: Subject, group: str | None) -> Page:
    payloads = None
    if subject.artifact is not None:
        folder = subject.artifact.folder / "ir" / "payload"
        payloads = {p.stem: p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.mlir"))}
    payloads = payloads or dict(subject.compilation.generated.payloads)
    if group is not None:
        if group not in payloads:
            raise UsageError(
                f"--group {group}: no payload of that name; there are {', '.join(payloads)}"
            )
        payloads = {group: payloads[group]}
    whole = "".join(f"// group {name}\n{text}\n" for name, text in payloads.items())
    return Page(whole, payloads)


def mlir_function(text: str, name: str) -> str:
    """The `func.func @name` of a module, or ""."""
    return _block(text, rf"^\s*func\.func (?:private )?@{re.escape(name)}\b", r"^  }$")


def llvm_function(text: str, name: str) -> str:
    """The `define` of a function, or ""."""
    return _block(text, rf'^define .*@"?{re.escape(name)}"?\(', r"^}$")


def asm_function(text: str, name: str) -> str:
    """From a function's label to its end, or ""."""
    label = rf"^_?{re.escape(name)}:"
    return _block(text, label, r"^(\.?Lfunc_end\d+:|\s*\.cfi_endproc)")


_EXTRACT: dict[str, Callable[[str, str], str]] = {
    "mlir": mlir_function,
    "llvm": llvm_function,
    "asm": asm_function,
}


def _block(text: str, first: str, last: str) -> str:
    """The lines from one that matches `first` to the next that matches `last`."""
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if lines or re.match(first, line):
            lines.append(line)
            if re.match(last, line) or (len(lines) == 1 and _is_declaration(line)):
                break
    return "".join(lines)


def _is_declaration(line: str) -> bool:
    return "func.func private" in line and not line.rstrip().endswith("{")
