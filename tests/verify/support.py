"""Damaging an artifact as somebody would who knows what he does: with all hashes up to date."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from bessemer.artifact.layout import StoredWeight
from bessemer.artifact.manifest import MANIFEST_FILE, WEIGHTS_FILE, FileRecord
from bessemer.artifact.reader import Artifact, read_manifest
from bessemer.artifact.weight_file import write_weights
from bessemer.compile_options import CompileOptions

OPTIONS = CompileOptions(weights="f16", kv="f32", context=64, chunk=16)


def rewrite_manifest(folder: Path, **changes: object) -> None:
    """Change fields of the manifest, and bring the records of all files up to date."""
    manifest = replace(read_manifest(folder), **changes)  # type: ignore[arg-type]
    files = {}
    for name, record in manifest.files.items():
        data = (folder / name).read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if name == WEIGHTS_FILE:
            digest = manifest.weights_digest
        files[name] = FileRecord(len(data), digest if data else record.sha256)
    text = replace(manifest, files=files).to_json()
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")


def rewrite_weight(folder: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Change the bytes of a stored weight, with all hashes brought up to date."""
    artifact = Artifact(folder, read_manifest(folder))
    stored = {w.name: np.array(artifact.stored(w.name)) for w in artifact.manifest.weights}
    change(stored[name])

    def blocks(weight: StoredWeight) -> list[np.ndarray]:
        return [stored[weight.name]]

    with (folder / WEIGHTS_FILE).open("wb") as stream:
        hashes = write_weights(stream, artifact.manifest.weights, blocks)
    rewrite_manifest(folder, weight_hashes=hashes)
