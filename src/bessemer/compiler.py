"""The whole pipeline: a checkpoint or a module in, an artifact out.

source -> import_model -> lower -> generate -> compile_module -> link -> write_artifact
(importer)              (passes)  (codegen)    (backend)                 (artifact)
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.arguments import checked_whole, shown
from bessemer.errors import CompileError, UsageError
from bessemer.quantize import FLOAT_FORMATS
from bessemer.weight_formats import (
    ALIASES,
    DEFAULT_FORMAT,
    WEIGHT_FORMATS,
    DefaultFormat,
    canonical_format,
)

if TYPE_CHECKING:
    import numpy as np

    from bessemer.artifact.manifest import Level
    from bessemer.backend.codegen import CompiledModule
    from bessemer.backend.target import Target
    from bessemer.codegen.description import Variant
    from bessemer.codegen.generate import Generated, GenerateOptions
    from bessemer.importer.api import Imported
    from bessemer.importer.weights import WeightReader
    from bessemer.passes.pipeline import Lowered

log = logging.getLogger(__name__)

KV_FORMATS = ("f32", "f16")
EMIT_FORMS = ("graph", "mlir", "llvm", "asm")
# Tokens of a session unless asked otherwise (or the model's own maximum, where that is less).
DEFAULT_CONTEXT = 4096
# Rows of a prefill step. Weights are read and widened once per step, so more rows cost less each;
# at 512 that share is below 1 %, while the arena of activations still is a few MiB.
DEFAULT_CHUNK = 512

LAYOUTS = ("artifact", "buddy")

STAGES = ("import", "passes", "codegen", "backend", "link", "weights")

Progress = Callable[[str, int, int], None]  # stage, done, total


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _one_of(option: str, value: str | None, allowed: tuple[str | None, ...]) -> None:
    if not isinstance(value, (str, type(None))) or value not in allowed:
        known = ", ".join(a for a in allowed if a)
        raise UsageError(f"{option} {value}: choose one of {known}")


# Imported when a model is compiled; an installation that only runs models is without them.
COMPILING_MODULES = frozenset(
    {"gguf", "huggingface_hub", "llvmlite", "mlir", "safetensors", "torch", "transformers"}
)


def what_to_install(error: ModuleNotFoundError) -> str | None:
    """What to do when a module that compiling needs is absent; None when it is another one."""
    if (error.name or "").partition(".")[0] not in COMPILING_MODULES:
        return None
    return f"{error.name} is not installed; to compile models: pip install 'bessemer[compile]'"


@contextlib.contextmanager
def compiling_modules() -> Iterator[None]:
    """A module that compiling needs and that is absent is a CompileError that says what to do."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = what_to_install(error)
        if message is None:
            raise
        raise CompileError(message) from error


@dataclass
class Compilation:
    """Every form of a model on its way, for `inspect` and `verify`; filled stage by stage."""

    imported: Imported
    options: CompileOptions
    target: Target
    lowered: Lowered
    generated: Generated
    objects: dict[str, CompiledModule] = field(default_factory=dict)
    dumps: dict[str, dict[str, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    # The same model for better processors, ascending, where `target` is the least of several.
    levels: list[Compilation] = field(default_factory=list)


def compile_model(
    source: Any,
    options: CompileOptions,
    output: Path,
    *,
    key: str = "",
    progress: Progress = lambda stage, done, total: None,
) -> Path:
    """Compile `source` (path, hub name, alias, Checkpoint or torch module) into a folder.

    Raises BessemerError of the stage that failed; nothing is left behind then.
    """
    from bessemer.backend.link import require_tools
    from bessemer.backend.target import Target

    start = time.perf_counter()
    target = Target.parse(options.target, options.cpu)
    require_tools(target)
    if options.runner:
        source = _checked_for_runner(source, target, options.static)
    compilation = generate_model(source, options, progress=progress)
    build_objects(compilation, progress=progress)
    return _write(compilation, output, key, start, progress)


def _checked_for_runner(source: Any, target: Target, static: bool) -> Any:
    """The source, opened, when there can be a standalone runner for it."""
    from bessemer.standalone import check_source, runner_target

    runner_target(target, static)
    if isinstance(source, (str, Path)):
        from bessemer.importer.checkpoint import open_checkpoint

        source = open_checkpoint(source)
    check_source(source)
    return source


def generate_model(
    source: Any, options: CompileOptions, *, progress: Progress = lambda stage, done, total: None
) -> Compilation:
    """The front half: import, passes and code generation, without machine code."""
    from bessemer.backend.target import Target
    from bessemer.passes.pipeline import lower

    seconds: dict[str, float] = {}
    targets = Target.parse_levels(options.target, options.cpu)
    if len(targets) > 1 and options.profile:
        raise UsageError(f"--cpu {options.cpu}: code that measures itself is for one CPU")
    with _stage("import", seconds, progress):
        imported = import_source(source, options)
    options = with_weights(options, imported.checkpoint)
    with _stage("passes", seconds, progress):
        lowered = lower(imported.graph)
    context = context_of(options, imported.context_length)
    with _stage("codegen", seconds, progress):
        generated = generate_for(lowered, options, targets, context)
    least, *others = (
        Compilation(imported, options, target, lowered, code, seconds=seconds)
        for target, code in zip(targets, generated, strict=True)
    )
    least.levels = others
    return least


def generate_for(
    lowered: Lowered, options: CompileOptions, targets: Sequence[Target], context: int
) -> list[Generated]:
    """Code of one model for each target, with the same layout of weights, state and scratch."""
    from bessemer.artifact.layout import ScratchLayout
    from bessemer.codegen.generate import generate

    def made(target: Target, scratch: ScratchLayout) -> Generated:
        chosen = replace(codegen_options(options, target, context), least_scratch=scratch)
        return generate(lowered.prefill, lowered.decode, chosen)

    found = [made(target, ScratchLayout(0, 0)) for target in targets]
    largest = ScratchLayout(
        max(code.scratch.shared_bytes for code in found),
        max(code.scratch.thread_bytes for code in found),
    )
    return [
        code if code.scratch == largest else made(target, largest)
        for target, code in zip(targets, found, strict=True)
    ]


def import_source(source: Any, options: CompileOptions) -> Imported:
    """What can be said against the options without torch and a capture is said before."""
    if isinstance(source, (str, Path)):
        from bessemer.importer.checkpoint import open_checkpoint

        source = open_checkpoint(source)
    if options.context is not None and isinstance(getattr(source, "config", None), Mapping):
        from bessemer.importer.architectures import check_stated_context

        check_stated_context(source.config, options.context)
    from bessemer.importer.api import import_model
    from bessemer.models import DefinitionOptions

    added = DefinitionOptions(options.low_precision, options.steering)
    return import_model(source, capture=options.capture, options=added)


def with_weights(options: CompileOptions, checkpoint: WeightReader) -> CompileOptions:
    """The options with a format of weights, chosen by the checkpoint where none is asked for."""
    if options.weights is not None:
        return options
    if options.schedule == "generic":  # plain lowerings read no blocks
        return replace(options, weights=DEFAULT_FORMAT)
    default = DefaultFormat.of(checkpoint)
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
        target.f32_lanes, target.vector_registers, chunk, options.kv, target.pair_dot
    )
    return GenerateOptions(
        machine,
        options.weights or DEFAULT_FORMAT,
        options.kv,
        context,
        options.schedule,
        profile=options.profile,
    )


def build_objects(
    compilation: Compilation, *, progress: Progress = lambda stage, done, total: None
) -> None:
    """Machine code of every MLIR module, into `compilation.objects`."""
    from bessemer.backend.codegen import compile_module

    modules, entries = compilation.generated.modules, compilation.generated.entries
    assembly = "asm" in compilation.options.emit
    with _stage("backend", compilation.seconds, progress):
        for i, (stem, text) in enumerate(modules.items()):
            progress("backend", i, len(modules))
            dump: dict[str, str] | None = {} if compilation.options.emit else None
            compilation.objects[stem] = compile_module(
                text,
                compilation.target,
                stem,
                exports=[f"_mlir_ciface_{stem}"] if stem in entries else [],
                assembly=assembly,
                dump=dump,
            )
            compilation.dumps[stem] = dump or {}
    for level in compilation.levels:
        build_objects(level, progress=progress)


def _write(
    compilation: Compilation, output: Path, key: str, start: float, progress: Progress
) -> Path:
    """Write the folder, the libraries last."""
    from bessemer.artifact.manifest import RopeSwitch
    from bessemer.artifact.writer import write_artifact
    from bessemer.libraries import Libraries

    imported, generated, options = (
        compilation.imported,
        compilation.generated,
        compilation.options,
    )
    origin = Origin.of(imported)
    rope = RopeSwitch(**imported.rope) if imported.rope else None
    with tempfile.TemporaryDirectory(prefix="bessemer-") as name:
        folder = Path(name)
        libraries = Libraries(
            generated,
            origin.name,
            compilation.target,
            code_variants(compilation),
            folder,
            rope,
            options.prefix,
        )
        with _stage("link", compilation.seconds, progress):
            code = model_objects(compilation, folder)
            objects = [*code, *libraries.native_objects()]

        def write_code(to: Path, weights_digest: str) -> None:
            description = libraries.write(objects, to, weights_digest)
            if options.runner:
                from bessemer.standalone import Runner

                runner = Runner(compilation.target, options.static, folder)
                runner.write(code, description, to)

        return write_artifact(
            output,
            generated=generated,
            write_code=write_code,
            read=imported.checkpoint.read,
            read_stored=stored_reader(imported.checkpoint),
            name=origin.name,
            config=imported.config,
            generation_config=imported.generation_config,
            options=options.to_json(),
            target=compilation.target.to_json(),
            required_features=compilation.target.required_features(),
            source=origin.to_json(),
            versions=_versions(),
            rope=rope,
            prefix=options.prefix,
            levels=manifest_levels(compilation),
            key=key,
            compile_seconds=lambda: time.perf_counter() - start,
            write_tokenizer=_tokenizer_writer(imported.checkpoint),
            extra_files=_emitted(compilation),
            progress=lambda done, total: progress("weights", done, total),
        )


def model_objects(compilation: Compilation, folder: Path) -> list[Path]:
    """Write the model's own objects. The globals of a better level's begin with its name."""
    from bessemer.backend.link import prefix_symbols

    objects = []
    for stem, module in compilation.objects.items():
        objects.append(folder / f"{stem}.o")
        objects[-1].write_bytes(module.object)
    for level in compilation.levels:
        name = level.target.level
        plain = []
        for stem, module in level.objects.items():
            plain.append(folder / f"{stem}.{name}.o")
            plain[-1].write_bytes(module.object)
        objects += prefix_symbols(plain, f"{name}_", folder / name)
    return objects


def code_variants(compilation: Compilation) -> list[Variant]:
    """What the library says of its code for each level of processors, the best first."""
    from bessemer.codegen.description import Variant

    return [
        *(
            Variant(tuple(level.target.required_features()), f"{level.target.level}_")
            for level in reversed(compilation.levels)
        ),
        Variant(tuple(compilation.target.required_features())),
    ]


def manifest_levels(compilation: Compilation) -> tuple[Level, ...]:
    """What a manifest says of the better levels, the best first."""
    from bessemer.artifact.manifest import Level
    from bessemer.artifact.writer import entry_points

    return tuple(
        Level(
            level.target.cpu,
            tuple(level.target.required_features()),
            entry_points(f"{compilation.options.prefix}{level.target.level}_"),
        )
        for level in reversed(compilation.levels)
    )


@dataclass(frozen=True)
class Origin:
    """Where a model came from: kind ("hf", "gguf", "module"), its place, and a content key."""

    name: str
    kind: str
    path: str
    fingerprint: str

    @staticmethod
    def of(imported: Imported) -> Origin:
        checkpoint = imported.checkpoint
        path = getattr(checkpoint, "path", None)
        kind = getattr(checkpoint, "kind", "module")
        if path is None:
            shown = type(imported.module).__name__ if imported.module is not None else "model"
        else:
            shown = Path(path).stem if Path(path).suffix == ".gguf" else Path(path).name
        place = "" if path is None else str(Path(path).resolve())
        return Origin(shown, kind, place, checkpoint.fingerprint())

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def _tokenizer_writer(checkpoint: WeightReader) -> Callable[[Path], None] | None:
    """Writes the checkpoint's tokenizer; None when it comes without one."""
    has_tokenizer = getattr(checkpoint, "has_tokenizer", lambda: False)
    return getattr(checkpoint, "write_tokenizer", None) if has_tokenizer() else None


def stored_reader(checkpoint: WeightReader) -> Callable[[str], tuple[str, np.ndarray] | None]:
    """Bit patterns of tensors that are kept as plain floats; None for quantised ones."""

    def read(name: str) -> tuple[str, np.ndarray] | None:
        dtype = checkpoint.info(name).dtype
        if dtype not in FLOAT_FORMATS:
            return None
        return dtype, checkpoint.read_stored(name)

    return read


def _emitted(compilation: Compilation) -> dict[str, str]:
    """The graphs, which `verify` needs where the checkpoint is gone, the work of each group, which
    `bench` needs, and the intermediate forms that `--emit` asks for; by path in the artifact.
    """
    from bessemer.artifact.work import WORK_FILE
    from bessemer.graph import print_graph

    emit = compilation.options.emit
    files = {
        "graph/imported.graph": print_graph(compilation.imported.graph),
        "graph/forward_prefill.graph": print_graph(compilation.lowered.prefill),
        WORK_FILE: compilation.generated.work.to_json(),
    }
    if "graph" in emit:
        files["ir/imported.graph"] = print_graph(compilation.imported.graph, locations=True)
        files["ir/forward_prefill.graph"] = print_graph(compilation.lowered.prefill)
        files["ir/forward_decode.graph"] = print_graph(compilation.lowered.decode)
    files |= _module_forms(compilation, "ir")
    for level in compilation.levels:
        files |= _module_forms(level, f"ir/{level.target.level}")
    if "mlir" in emit:
        for name, text in compilation.generated.payloads.items():
            files[f"ir/payload/{name}.mlir"] = text
    return files


def _module_forms(compilation: Compilation, folder: str) -> dict[str, str]:
    """The forms of one target's modules, by path."""
    emit = compilation.options.emit
    files = {}
    for stem, text in compilation.generated.modules.items():
        module = compilation.objects[stem]
        if "mlir" in emit:
            files[f"{folder}/{stem}.mlir"] = text
        if "llvm" in emit:
            files[f"{folder}/{stem}.ll"] = module.llvm_ir
        if "asm" in emit and module.assembly is not None:
            files[f"{folder}/{stem}.s"] = module.assembly
    return files


def context_of(options: CompileOptions, model_maximum: int) -> int:
    if options.context is None:
        return min(model_maximum, DEFAULT_CONTEXT)
    if options.context > model_maximum:
        raise UsageError(
            f"--context {options.context}: the model was made for at most {model_maximum} tokens"
        )
    return options.context


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    names = ("bessemer", "torch", "transformers", "llvmlite", "xtc-mlir-python-bindings")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class _stage:
    """Times a stage and tells its begin and end."""

    def __init__(self, name: str, seconds: dict[str, float], progress: Progress) -> None:
        self._name, self._seconds, self._progress = name, seconds, progress

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._progress(self._name, 0, 1)

    def __exit__(self, *error: object) -> None:
        spent = time.perf_counter() - self._start
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + spent
        if error[0] is None:
            self._progress(self._name, 1, 1)
