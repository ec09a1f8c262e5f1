"""What a compilation puts into an artifact besides weights: objects, intermediate forms, and what
the manifest says of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.quantize import FLOAT_FORMATS

if TYPE_CHECKING:
    import numpy as np

    from bessemer.artifact.manifest import Level
    from bessemer.artifact.writer import ReadStored
    from bessemer.codegen.description import Variant
    from bessemer.compiler import Compilation
    from bessemer.importer.api import Imported
    from bessemer.importer.weights import WeightReader


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


def tokenizer_writer(checkpoint: WeightReader) -> Callable[[Path], None] | None:
    """Writes the checkpoint's tokenizer; None when it comes without one."""
    has_tokenizer = getattr(checkpoint, "has_tokenizer", lambda: False)
    return getattr(checkpoint, "write_tokenizer", None) if has_tokenizer() else None


def stored_reader(checkpoint: WeightReader) -> ReadStored:
    """Bit patterns of tensors that are kept as plain floats of a dtype; None of all others."""

    def read(name: str, dtype: str, rows: range | None = None) -> np.ndarray | None:
        if dtype not in FLOAT_FORMATS or checkpoint.info(name).dtype != dtype:
            return None
        return checkpoint.read_stored(name, rows)

    return read


def emitted_files(compilation: Compilation) -> dict[str, str]:
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


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    names = ("bessemer", "torch", "transformers", "llvmlite", "xtc-mlir-python-bindings")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
