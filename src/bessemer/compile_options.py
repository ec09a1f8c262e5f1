"""How a model is compiled: the options, their checks, and what they mean to code generation."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bessemer.arguments import checked_whole, shown
from bessemer.errors import UsageError
from bessemer.weight_formats import (
    ALIASES,
    DEFAULT_FORMAT,
    WEIGHT_FORMATS,
    DefaultFormat,
    Tensors,
    canonical_format,
)

if TYPE_CHECKING:
    from bessemer.backend.target import Target
    from bessemer.codegen.generate import GenerateOptions
    from bessemer.importer.weights import WeightReader

log = logging.getLogger(__name__)

KV_FORMATS = ("f32", "f16")
EMIT_FORMS = ("graph", "mlir", "llvm", "asm")
# Tokens of a session unless asked otherwise (or the model's own maximum, where that is less).
DEFAULT_CONTEXT = 4096
# Rows of a prefill step. Weights are read and widened once per step, so more rows cost less each;
# at 512 that share is below 1 %, while the arena of activations still is a few MiB.
DEFAULT_CHUNK = 512

LAYOUTS = ("artifact", "buddy")


@dataclass(frozen=True)
class CompileOptions:
    """weights: storage of matrices (None: q8_0 where the checkpoint's are quantised, else f16); the
    aliases w8a32, w8a16 and w8a8 become q8_0.  kv: storage of the KV cache.  context: tokens of a
    session (None: the model's, at most 4096).  target, cpu: see `backend.target.Target.parse`.
    emit: intermediate forms kept under ir/.  capture: "export" or "dynamo".  chunk: most rows of
    a prefill step.  prefix: put before every global symbol.  schedule: "kernels" or "generic".
    profile: the code measures itself, for `bessemer bench --profile`; slightly slower.
    low_precision: round caches and index keys as in the model's training, where it has such steps.
    steering: sessions can be steered, see `bessemer.steering`.
    layout: "artifact", or "buddy" for the files of `buddy_layout`.
    runner: also make the standalone runner, see `standalone`.  static: it needs no shared library.
    """

    weights: str | None = None
    kv: str = "f16"
    context: int | None = None
    target: str = "native"
    cpu: str | None = None
    emit: tuple[str, ...] = field(default=())
    capture: str = "export"
    chunk: int = DEFAULT_CHUNK
    prefix: str = ""
    schedule: str = "kernels"
    profile: bool = False
    low_precision: bool = False
    steering: bool = False
    layout: str = "artifact"
    runner: bool = False
    static: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.weights, str):
            object.__setattr__(self, "weights", canonical_format(self.weights))
        _one_of("--weights", self.weights, (None, *WEIGHT_FORMATS, *ALIASES))
        _one_of("--kv", self.kv, KV_FORMATS)
        _one_of("--capture", self.capture, ("export", "dynamo"))
        _one_of("--schedule", self.schedule, ("kernels", "generic"))
        _one_of("--layout", self.layout, LAYOUTS)
        if not isinstance(self.emit, tuple):
            raise UsageError(f"--emit {shown(self.emit)}: give a tuple of {', '.join(EMIT_FORMS)}")
        for form in self.emit:
            _one_of("--emit", form, EMIT_FORMS)
        if self.context is not None:
            checked_whole("--context", self.context, 1)
        checked_whole("--chunk", self.chunk, 1)
        for option, name in (("--target", self.target), ("--cpu", self.cpu or "")):
            if not isinstance(name, str):
                raise UsageError(f"{option} {shown(name)}: it must be a name")
        if not isinstance(self.prefix, str) or (
            self.prefix and not (self.prefix.isidentifier() and self.prefix.isascii())
        ):
            raise UsageError(f"--prefix {shown(self.prefix)}: it must be a C identifier")
        if self.static and not self.runner:
            raise UsageError("--static is about the standalone runner: give --runner, too")
        if self.runner and self.layout != "artifact":
            raise UsageError(f"--layout {self.layout} has no standalone runner: leave out --runner")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _one_of(option: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if not isinstance(value, (str, type(None))) or value not in allowed:
        known = ", ".join(a for a in allowed if a)
        raise UsageError(f"{option} {value}: choose one of {known}")


def default_format(options: CompileOptions, checkpoint: Tensors) -> DefaultFormat:
    """The format of a checkpoint's weights when the options ask for none."""
    if options.schedule == "generic":  # plain lowerings read no blocks
        return DefaultFormat(DEFAULT_FORMAT)
    return DefaultFormat.of(checkpoint)


def with_weights(options: CompileOptions, checkpoint: WeightReader) -> CompileOptions:
    """The options with a format of weights, chosen by the checkpoint where none is asked for."""
    if options.weights is not None:
        return options
    default = default_format(options, checkpoint)
    if default.quantised:
        log.info(
            "the checkpoint is quantised (%s): its weights are stored as %s, unless --weights says "
            "otherwise",
            ", ".join(default.quantised),
            default.name,
        )
    return replace(options, weights=default.name)


def codegen_options(options: CompileOptions, target: Target, context: int) -> GenerateOptions:
    """What code generation is told. context: tokens of a session."""
    from bessemer.codegen.generate import GenerateOptions
    from bessemer.codegen.group import CodegenTarget

    chunk = min(options.chunk, context)
    machine = CodegenTarget(
        target.f32_lanes,
        target.vector_registers,
        chunk,
        options.kv,
        target.pair_dot,
        target.loads_halves,
    )
    return GenerateOptions(
        machine,
        options.weights or DEFAULT_FORMAT,
        options.kv,
        context,
        options.schedule,
        profile=options.profile,
    )


def context_of(options: CompileOptions, model_maximum: int) -> int:
    if options.context is None:
        return min(model_maximum, DEFAULT_CONTEXT)
    if options.context > model_maximum:
        raise UsageError(
            f"--context {options.context}: the model was made for at most {model_maximum} tokens"
        )
    return options.context
