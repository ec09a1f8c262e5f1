"""Writing an artifact: libraries, weights, tokenizer and manifest into one folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from bessemer.artifact.files import file_hash
from bessemer.artifact.folder import tree, whole_folder
from bessemer.artifact.layout import ScratchLayout, StateLayout, StoredWeight
from bessemer.artifact.manifest import (
    ENTRY_POINTS,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    FileRecord,
    Level,
    Manifest,
    RopeSwitch,
    table_digest,
    weight_table,
)
from bessemer.artifact.packing import ELEMENTS, PART_NUMBERS, pack, row_parts
from bessemer.artifact.space import check_space
from bessemer.artifact.weight_file import Blocks, data_end, write_weights
from bessemer.graph import Value, evaluate_rows, evaluate_value, splits

C_INTERFACE = "_mlir_ciface_"

# What is written after the check of the disk, beside tensors and code: manifest, header and
# description, which have a part of their own size, and some lines of every weight.
OTHER_BYTES = 1 << 20
BYTES_OF_WEIGHT = 2 << 10

FileContent = Path | str | bytes


class Read(Protocol):
    """A checkpoint tensor by name, float32; or rows of its leading axis, asked of large ones."""

    def __call__(self, name: str, rows: range | None = None, /) -> np.ndarray: ...


class ReadStored(Protocol):
    """The bit patterns of a tensor that is kept as a dtype ("f16", ...), or rows of them; None of
    one that isn't. Saves the way over float32 when the artifact stores the same dtype.
    """

    def __call__(
        self, name: str, dtype: str, rows: range | None = None, /
    ) -> np.ndarray | None: ...


class GeneratedModel(Protocol):
    """What the writer needs of the result of code generation."""

    @property
    def weights(self) -> Sequence[StoredWeight]: ...
    @property
    def expressions(self) -> Mapping[str, Value]: ...
    @property
    def state(self) -> StateLayout: ...
    @property
    def scratch(self) -> ScratchLayout: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


def write_artifact(
    destination: Path,
    *,
    generated: GeneratedModel,
    write_code: Callable[[Path, str], None],
    read: Read,
    read_stored: ReadStored | None = None,
    name: str,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    options: Mapping[str, Any],
    target: Mapping[str, Any],
    required_features: Sequence[str],
    source: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
    rope: RopeSwitch | None = None,
    prefix: str = "",
    levels: Sequence[Level] = (),
    key: str = "",
    code_bytes: Callable[[Path], int] = lambda folder: 0,
    compile_seconds: float | Callable[[], float] = 0.0,
    write_tokenizer: Callable[[Path], None] | None = None,
    extra_files: Mapping[str, FileContent] | None = None,
    replace: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the artifact of a compiled model; it is there in full afterwards, or nothing is.

    write_code: puts model.so, libmodel.a and model.h into the folder that it is given. It is called
    last: tokenizer and weights are there, and it learns the hash of the weights' table (the
    manifest's `weights_digest`), which the library must know.
    prefix: what every global symbol of the library begins with (`--prefix`).
    code_bytes: tells how much `write_code` will write at the most, given what the folder has then.
    write_tokenizer: puts the tokenizer's files into a folder.  extra_files: relative path (such as
    "ir/forward_prefill.mlir") to content.  replace: whether a finished artifact that is there by
    the end is replaced.  progress: called with the weight bytes written and their sum.
    For the rest see `Manifest`.

    Returns `destination`. Raises ArtifactError where it can't be written, CompileError when a
    number doesn't fit the weights' dtype.
    """
    blocks_of = weight_blocks(generated.expressions, read, read_stored)
    with whole_folder(destination, replace=replace) as folder:
        for path, content in (extra_files or {}).items():
            _write_file(_inside(folder, path), content)
        if write_tokenizer is not None:
            write_tokenizer(folder)
        if config and not (folder / "config.json").exists():
            _write_file(folder / "config.json", _json(config))
        described = OTHER_BYTES + BYTES_OF_WEIGHT * len(generated.weights)
        check_space(destination, data_end(generated.weights) + code_bytes(folder) + described)
        with (folder / WEIGHTS_FILE).open("wb") as stream:
            hashes = write_weights(stream, generated.weights, blocks_of, progress)
        write_code(folder, table_digest(weight_table(generated.weights, hashes)))
        manifest = Manifest(
            name=name,
            config=config,
            generation_config=generation_config,
            vocab_size=generated.vocab_size,
            hidden_size=generated.hidden_size,
            options=options,
            target=target,
            required_features=tuple(required_features),
            entry_points=entry_points(prefix),
            prefix=prefix,
            levels=tuple(levels),
            weights=tuple(generated.weights),
            weight_hashes=hashes,
            state=generated.state,
            scratch=generated.scratch,
            files=_records(folder, generated.weights, hashes),
            source=source or {},
            versions=versions or {},
            rope=rope,
            key=key,
            compile_seconds=compile_seconds() if callable(compile_seconds) else compile_seconds,
        )
        # A manifest that its own reader would refuse must not be published.
        Manifest.from_json(manifest.to_json(), where="the manifest of this compilation")
        _write_file(folder / MANIFEST_FILE, manifest.to_json())
    return destination


def entry_points(prefix: str) -> dict[str, str]:
    """Symbols of the entry points in code whose globals begin with `prefix`."""
    return {e: prefix + C_INTERFACE + e for e in ENTRY_POINTS}


def _records(
    folder: Path, weights: Sequence[StoredWeight], hashes: Mapping[str, str]
) -> dict[str, FileRecord]:
    """Size and hash of every file that was written so far."""
    files = {
        path: FileRecord((folder / path).stat().st_size, file_hash(folder / path))
        for path in tree(folder)
        if path != WEIGHTS_FILE
    }
    digest = table_digest(weight_table(weights, hashes))
    files[WEIGHTS_FILE] = FileRecord((folder / WEIGHTS_FILE).stat().st_size, digest)
    return files


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), indent=2, ensure_ascii=False) + "\n"


def weight_blocks(
    expressions: Mapping[str, Value],
    read: Read,
    read_stored: ReadStored | None,
) -> Callable[[StoredWeight], Blocks]:
    """How a weight becomes bytes. A part of one is held in memory at a time (`row_parts`)."""

    def blocks_of(weight: StoredWeight) -> Blocks:
        expression = expressions.get(weight.name)
        if expression is not None and expression.op != "param":
            return expression_blocks(expression, read, weight)
        param = weight.name if expression is None else str(expression.node.attrs["name"])
        return _tensor_blocks(param, read, read_stored, weight)

    return blocks_of


def expression_blocks(expression: Value, read: Read, weight: StoredWeight) -> Blocks:
    """The bytes of a weight that is made of checkpoint tensors, of all rows at once only where
    there are few, or where they can't be told apart.
    """
    parts = row_parts(weight)
    if len(parts) > 1 and splits(expression, math.prod(weight.shape[1:]) + PART_NUMBERS):
        for rows in parts:
            yield from pack(evaluate_rows(expression, read, rows), weight, rows=rows)
    else:
        yield from pack(evaluate_value(expression, read), weight)


def _tensor_blocks(
    param: str, read: Read, read_stored: ReadStored | None, weight: StoredWeight
) -> Blocks:
    """The bytes of a weight that is a checkpoint tensor."""
    parts: Sequence[range | None] = row_parts(weight)
    for rows in parts if len(parts) > 1 else [None]:
        given = () if rows is None else (rows,)
        same = None if read_stored is None else read_stored(param, weight.dtype, *given)
        stored = same is not None and same.dtype == ELEMENTS[weight.dtype]
        values = read(param, *given) if same is None or not stored else same
        del same
        yield from pack(values, weight, stored=stored, rows=rows)


def _inside(folder: Path, path: str) -> Path:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise ValueError(f"{path!r} is no path inside an artifact")
    return folder / parts


def _write_file(path: Path, content: FileContent) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        shutil.copyfile(content, path)
    elif isinstance(content, str):
        path.write_bytes(content.encode())
    else:
        path.write_bytes(content)
