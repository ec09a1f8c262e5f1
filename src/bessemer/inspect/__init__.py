"""Looking at a model at every stage of its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bessemer.errors import UsageError
from bessemer.inspect.page import Page

if TYPE_CHECKING:
    from bessemer.compile_options import CompileOptions
    from bessemer.inspect.subject import Subject

STAGES = ("graph", "passes", "groups", "mlir", "llvm", "asm", "weights", "abi", "memory")

__all__ = ["STAGES", "Choice", "Page", "inspect"]


@dataclass(frozen=True)
class Choice:
    """What of a stage is shown.

    of: the graph: "imported", "prefill" or "decode".  after: the graph after a pass, by name or by
    the number that `passes` shows.  module, group: of code, one module or one function.  form: of
    MLIR, "kernel" (what is emitted), "payload" (groups as linalg on tensors), or a step of the
    backend: "bufferized", "loops", "math", "llvm".
    """

    of: str = "imported"
    after: str | None = None
    module: str | None = None
    group: str | None = None
    form: str = "kernel"


def inspect(
    model: Any,
    stage: str | None = None,
    *,
    choice: Choice | None = None,
    checkpoint: Any = None,
    options: CompileOptions | None = None,
    bandwidth: float | None = None,
) -> Page:
    """One stage of a model, or an overview.

    model: a compiled folder, a checkpoint (path, hub name, alias), a config.json without weights, a
    torch module, or a Subject that `open_subject` gave, which keeps what it made for the next
    stage.  stage: one of STAGES.  checkpoint: the source of a compiled folder, if it isn't where it
    was.  options: of the compilation, for what is not compiled.  bandwidth: bytes that the machine
    reads in a second; `memory` then estimates the speed of decoding.

    A compiled folder shows what it holds (`compile --emit`); other stages are made again from its
    source. Raises UsageError for an unknown stage, module or function, BessemerError when the model
    can't be read or compiled.
    """
    if stage is not None and stage not in STAGES:
        raise UsageError(f"STAGE {stage}: choose one of {', '.join(STAGES)}")
    from bessemer.inspect.subject import Subject, open_subject

    if isinstance(model, Subject):
        subject = model
    else:
        subject = open_subject(model, checkpoint=checkpoint, options=options)
    return _page(subject, stage, choice or Choice(), bandwidth)


def _page(subject: Subject, stage: str | None, choice: Choice, bandwidth: float | None) -> Page:
    from bessemer.inspect import abi, graphs, groups, modules, overview, plan, weights

    if stage == "graph":
        return graphs.graph(subject, choice.of, choice.after)
    if stage in ("mlir", "llvm", "asm"):
        return modules.code(subject, stage, choice.module, choice.group, choice.form)
    if stage == "memory":
        return plan.memory_page(subject, bandwidth)
    pages = {
        None: overview.overview,
        "passes": graphs.passes,
        "groups": groups.groups,
        "weights": weights.weights,
        "abi": abi.abi,
    }
    return pages[stage](subject)
