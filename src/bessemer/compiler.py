"""The whole pipeline: a checkpoint or a module in, an artifact out.

source -> import_model -> lower -> generate -> compile_module -> link -> write_artifact
(importer)              (passes)  (codegen)    (backend)                 (artifact)
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.artifact_parts import (
    Origin,
    code_variants,
    emitted_files,
    manifest_levels,
    model_objects,
    stored_reader,
    tokenizer_writer,
    versions,
)
from bessemer.compile_options import (
    CompileOptions,
    codegen_options,
    context_of,
    default_format,
    with_weights,
)
from bessemer.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from bessemer.backend.codegen import CompiledModule
    from bessemer.backend.target import Target
    from bessemer.codegen.generate import Generated
    from bessemer.importer.api import Imported
    from bessemer.passes.pipeline import Lowered

# As progress tells them; "runner" only where one is made.
STAGES = ("import", "passes", "codegen", "backend", "link", "weights", "runner")

Progress = Callable[[str, int, int], None]  # stage, done, total


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
    source = opened(source)
    check_room(source, options, output)
    compilation = generate_model(source, options, progress=progress)
    _check_decisions(compilation)
    build_objects(compilation, progress=progress)
    return _write(compilation, output, key, start, progress)


def _check_decisions(compilation: Compilation) -> None:
    """Raises CheckpointError where a parameter that decides, such as a router's, holds NaN: a score
    that is no number is the least, so that the model would go on without some of its experts.
    NaN anywhere else shows in the logits.
    """
    import numpy as np

    from bessemer.codegen.control import control_params
    from bessemer.graph import evaluate_value

    read, expressions = compilation.imported.checkpoint.read, compilation.generated.expressions
    for node in control_params(compilation.lowered.prefill):
        name = str(node.attrs["name"])
        wrong = int(np.isnan(evaluate_value(expressions[name], read)).sum())
        if wrong:
            raise CheckpointError(
                f"tensor {name} holds NaN ({wrong} of its numbers), and it decides which experts "
                "work or how streams are mixed: the checkpoint is damaged; download it again"
            )


def _checked_for_runner(source: Any, target: Target, static: bool) -> Any:
    """The source, opened, when there can be a standalone runner for it."""
    from bessemer.standalone import check_source, runner_target

    runner_target(target, static)
    source = opened(source)
    check_source(source)
    return source


def opened(source: Any) -> Any:
    """A checkpoint for what names one; else the source as it is."""
    if not isinstance(source, (str, Path)):
        return source
    from bessemer.importer.checkpoint import open_checkpoint

    return open_checkpoint(source)


def check_room(source: Any, options: CompileOptions, output: Path) -> None:
    """Raises ArtifactError where the weights alone are more than the disk can hold, before the
    model is read. The exact check comes when all sizes are known (`artifact.writer`).
    """
    from bessemer.artifact.space import check_space, least_weight_bytes
    from bessemer.importer.checkpoint import Checkpoint

    if isinstance(source, Checkpoint):
        weights = options.weights or default_format(options, source).name
        smaller = weights != "q8_0" and options.layout == "artifact"
        advice = ", or store the weights smaller (--weights q8_0)" if smaller else ""
        check_space(output, least_weight_bytes(source, source.config, weights), advice)


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
    source = opened(source)
    if options.context is not None and isinstance(getattr(source, "config", None), Mapping):
        from bessemer.importer.architectures import check_stated_context

        check_stated_context(source.config, options.context)
    from bessemer.importer.api import import_model
    from bessemer.models import DefinitionOptions

    added = DefinitionOptions(options.low_precision, options.steering)
    return import_model(source, capture=options.capture, options=added)


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
    from bessemer.artifact.space import code_bytes
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

        def most_code(to: Path) -> int:
            return code_bytes(objects, to / "tokenizer.json" if options.runner else None)

        def write_code(to: Path, weights_digest: str) -> None:
            description = libraries.write(objects, to, weights_digest)
            if options.runner:
                from bessemer.standalone import Runner

                with _stage("runner", compilation.seconds, progress):
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
            versions=versions(),
            rope=rope,
            prefix=options.prefix,
            levels=manifest_levels(compilation),
            key=key,
            code_bytes=most_code,
            compile_seconds=lambda: time.perf_counter() - start,
            write_tokenizer=tokenizer_writer(imported.checkpoint),
            extra_files=emitted_files(compilation),
            progress=lambda done, total: progress("weights", done, total),
        )


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
