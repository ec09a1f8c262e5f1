"""What is inspected: an artifact, or a source that is compiled as far as a stage needs it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.arguments import checked_model
from bessemer.artifact.manifest import is_artifact
from bessemer.artifact.reader import Artifact, read_manifest
from bessemer.errors import ArtifactError, UsageError
from bessemer.graph import Graph, GraphError, parse_graph
from bessemer.verify.reference import IMPORTED_GRAPH

if TYPE_CHECKING:
    from bessemer.backend.codegen import CompiledModule
    from bessemer.compile_options import CompileOptions
    from bessemer.compiler import Compilation

# Files with weights, also those that can't be read: their errors say more than a plan would.
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class KeptModel:
    """What an artifact keeps of an import: enough to generate its code again, without torch."""

    graph: Graph
    config: dict[str, Any]
    capture: str


@dataclass
class Subject:
    """artifact: None for a model that is not compiled.  source: None when it can't be had, for the
    `reason` given.  config_only: the source is a config without weights.  Stages are compiled when
    they are first asked for.
    """

    name: str
    artifact: Artifact | None
    source: Any
    reason: str
    options: CompileOptions
    config_only: bool = False
    _objects: dict[str, CompiledModule] = field(default_factory=dict)

    @cached_property
    def compilation(self) -> Compilation:
        """The model up to MLIR: from the graph that an artifact keeps, which is fast, or from its
        source. Raises BessemerError when there is neither.
        """
        kept = self.kept_graph(IMPORTED_GRAPH)
        if self.artifact is None or kept is None:
            return self.located
        return _compile_kept(self.artifact, kept, self.options)

    @cached_property
    def located(self) -> Compilation:
        """As `compilation`, from the source if possible: its ops know their modules and lines."""
        from bessemer.compiler import generate_model

        if self.source is not None:
            return generate_model(self.source, self.options)
        kept = self.kept_graph(IMPORTED_GRAPH)
        if self.artifact is None or kept is None:
            raise ArtifactError(
                f"{self.name}: this stage is not kept in the compiled folder, and {self.reason}"
            )
        return _compile_kept(self.artifact, kept, self.options)

    def kept(self, path: str) -> str | None:
        """A text file of the artifact, or None when it has none of that name."""
        if self.artifact is None:
            return None
        file = self.artifact.folder / path
        try:
            return file.read_text(encoding="utf-8") if file.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{file} can't be read: {error}") from None

    def kept_graph(self, path: str) -> Graph | None:
        """A graph that the artifact keeps, or None."""
        text = self.kept(path)
        if text is None:
            return None
        try:
            return parse_graph(text)
        except GraphError as error:
            raise ArtifactError(f"{path} of {self.name} is damaged: {error}") from None

    def modules(self) -> list[str]:
        """Stems of the MLIR modules, main graphs first."""
        if self.artifact is not None:
            found = sorted(p.stem for p in (self.artifact.folder / "ir").glob("*.mlir"))
            if found:
                return found
        return sorted(self.compilation.generated.modules)

    def compiled(self, stem: str, *, assembly: bool) -> CompiledModule:
        """Machine code of one module, with its LLVM IR."""
        from bessemer.backend.codegen import compile_module

        module = self._objects.get(stem)
        if module is None or (assembly and module.assembly is None):
            generated = self.compilation.generated
            exports = [f"_mlir_ciface_{stem}"] if stem in generated.entries else []
            module = compile_module(
                generated.modules[stem],
                self.compilation.target,
                stem,
                exports=exports,
                assembly=assembly,
            )
            self._objects[stem] = module
        return module


def _compile_kept(artifact: Artifact, graph: Graph, options: CompileOptions) -> Compilation:
    """Passes and code generation of the graph that an artifact keeps."""
    from bessemer.backend.target import Target
    from bessemer.codegen.generate import generate
    from bessemer.compile_options import codegen_options
    from bessemer.compiler import Compilation
    from bessemer.passes.pipeline import lower

    manifest = artifact.manifest
    target = Target.parse(options.target, options.cpu)
    start = time.perf_counter()
    lowered = lower(graph)
    seconds = {"passes": time.perf_counter() - start}
    generated = generate(
        lowered.prefill,
        lowered.decode,
        codegen_options(options, target, manifest.context_length),
    )
    model: Any = KeptModel(graph, dict(manifest.config), options.capture)
    return Compilation(model, options, target, lowered, generated, seconds=seconds)


def open_subject(
    model: Any, *, checkpoint: Any = None, options: CompileOptions | None = None
) -> Subject:
    """An artifact's folder, or anything that can be compiled.

    checkpoint: the source of an artifact, when it isn't where the manifest says.
    Raises ArtifactError for a damaged manifest, UsageError for options of a compiled model.
    """
    from bessemer.api import check_manifest_is_there
    from bessemer.compile_options import CompileOptions
    from bessemer.verify.model import find_source, options_of

    if isinstance(model, (str, Path)) and is_artifact(checked_model(model)):
        if options not in (None, CompileOptions()):
            raise UsageError(f"{model} is compiled already: its options can't be changed")
        folder = checked_model(model)
        manifest = read_manifest(folder)
        origin = find_source(manifest, checkpoint)
        recorded = options_of(manifest.options)
        artifact = Artifact(folder, manifest)
        return Subject(manifest.name, artifact, origin.source, origin.reason, recorded)
    if not isinstance(model, (str, Path)):
        return Subject(type(model).__name__, None, model, "", options or CompileOptions())
    check_manifest_is_there(checked_model(model))
    config = config_without_weights(Path(model).expanduser())
    if config is None:
        return Subject(str(model), None, model, "", options or CompileOptions())
    from bessemer.importer.outline import ConfigCheckpoint

    source = ConfigCheckpoint.of_file(config)
    return Subject(str(model), None, source, "", options or CompileOptions(), config_only=True)


def config_without_weights(path: Path) -> Path | None:
    """The config.json that `path` is, or that is alone in the folder `path`: no weights beside it.
    None for anything else.
    """
    if path.is_file():
        return path if path.suffix == ".json" else None
    config = path / "config.json"
    if not config.is_file() or any(next(path.glob(p), None) for p in WEIGHT_PATTERNS):
        return None
    return config
