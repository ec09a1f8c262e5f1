"""Opening an artifact, and checking that its parts are whole and belong together."""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bessemer.arguments import checked_path
from bessemer.artifact.files import file_hash
from bessemer.artifact.manifest import (
    LIBRARY_FILE,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    Manifest,
    is_artifact,
    weight_table,
)
from bessemer.artifact.packing import unpack
from bessemer.artifact.weight_file import data_end, describe_mismatch, read_table
from bessemer.errors import ArtifactError

__all__ = ["Artifact", "Check", "is_artifact", "open_artifact", "read_manifest", "verify_files"]

# No manifest is as large: a tensor's entry takes about 300 bytes.
MAX_MANIFEST_BYTES = 256 << 20

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Check:
    """The outcome of one integrity check. detail: what was compared, or what is wrong."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Artifact:
    """An opened artifact: its folder and its checked manifest."""

    folder: Path
    manifest: Manifest

    @property
    def library(self) -> Path:
        return self.folder / LIBRARY_FILE

    @property
    def weights_file(self) -> Path:
        return self.folder / WEIGHTS_FILE

    def stored(self, name: str) -> npt.NDArray[np.uint8]:
        """The bytes of a weight as they are stored, mapped read-only."""
        weight = next((w for w in self.manifest.weights if w.name == name), None)
        if weight is None:
            raise KeyError(f"{self.folder} stores no weight {name!r}")
        if weight.nbytes == 0:
            return np.empty(0, np.uint8)
        return np.memmap(
            self.weights_file, np.uint8, "r", offset=weight.offset, shape=(weight.nbytes,)
        )

    def weight(self, name: str) -> np.ndarray:
        """A stored weight in its logical shape; float types as float32."""
        weight = next((w for w in self.manifest.weights if w.name == name), None)
        if weight is None:
            raise KeyError(f"{self.folder} stores no weight {name!r}")
        return unpack(self.stored(name), weight)


def read_manifest(folder: Path) -> Manifest:
    """The checked manifest in `folder`. ArtifactError when there is none or it is damaged."""
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise ArtifactError(f"{path} is too large to be a manifest")
        text = path.read_bytes()
    except FileNotFoundError:
        what = "has no manifest.json" if folder.is_dir() else "does not exist"
        raise ArtifactError(
            f"{folder} {what}, so it is no compiled model; make one with "
            "`bessemer compile MODEL -o DIR`"
        ) from None
    except NotADirectoryError:
        raise ArtifactError(
            f"{folder} is a file, and no compiled model; make one of it with "
            f"`bessemer compile {folder} -o DIR`"
        ) from None
    except OSError as error:
        raise ArtifactError(f"{path} can't be read: {error.strerror or error}") from None
    return Manifest.from_json(text, str(path))


def open_artifact(folder: str | Path, *, check_cpu: bool = True) -> Artifact:
    """Open the artifact in `folder` and make sure that it can be run here.

    Always checked, in milliseconds: the manifest with its layouts, the presence and size of every
    file, the hash of the library, and that weights.bin is the one that the manifest describes
    (count, names, dtypes, shapes, places and recorded hashes). The content of weights.bin is read
    by `verify_files` alone. check_cpu: whether this machine must be able to run the code.

    Raises ArtifactError for the first thing that is wrong.
    """
    root = checked_path("the compiled folder", folder)
    artifact = Artifact(root, read_manifest(root))
    if check_cpu:
        check_target(artifact.manifest, root)
    for checks in (_check_sizes, _check_library, _check_table):
        for check in checks(artifact):
            if not check.ok:
                raise ArtifactError(f"{root}: {check.detail}")
    return artifact


def check_target(manifest: Manifest, where: Path) -> None:
    """Raise ArtifactError unless this machine can run code for the manifest's target."""
    from bessemer.runtime.cpu import missing_features

    triple = str(manifest.target.get("triple", ""))
    machine = platform.machine().lower()
    here = _MACHINES.get(machine, machine)
    arch = triple.split("-")[0]
    if _MACHINES.get(arch, arch) != here:
        raise ArtifactError(
            f"{where} was compiled for {triple}, and this machine is {here}: compile the model "
            "here, or with --target for this machine"
        )
    system = platform.system().lower()
    if triple and system not in triple.replace("macosx", "darwin"):
        raise ArtifactError(
            f"{where} was compiled for {triple}, and this system is {platform.system()}: compile "
            "the model here"
        )
    missing = missing_features(list(manifest.required_features))
    if missing:
        raise ArtifactError(
            f"{where} was compiled for a CPU with {', '.join(missing)}, which this one "
            f"lacks (compiled for {manifest.target.get('cpu', 'another CPU')}): compile the model "
            "here, or with --cpu baseline"
        )


def verify_files(
    artifact: Artifact, progress: Callable[[int, int], None] | None = None
) -> list[Check]:
    """Read everything and compare it with the manifest: sizes, hashes, and each weight.

    progress: called with the weight bytes read and their sum.
    """
    checks = _check_sizes(artifact)
    if not all(c.ok for c in checks):
        return checks
    checks += [_check_hash(artifact, name) for name in artifact.manifest.files]
    return [*checks, *_check_table(artifact), *_check_weights(artifact, progress)]


def _check_sizes(artifact: Artifact) -> list[Check]:
    return [_check_size(artifact, name) for name in artifact.manifest.files]


def _check_size(artifact: Artifact, name: str) -> Check:
    record = artifact.manifest.files[name]
    try:
        actual = (artifact.folder / name).stat().st_size
    except FileNotFoundError:
        return Check(f"file {name}", False, f"{name} is missing: compile the model again")
    except OSError as error:
        return Check(f"file {name}", False, f"{name} can't be read: {error.strerror}")
    if actual != record.nbytes:
        if name == WEIGHTS_FILE:
            with contextlib.suppress(ArtifactError):  # cut off: the size says it best
                read_table(artifact.weights_file)
                for check in _check_table(artifact):
                    if not check.ok:
                        return check
        detail = (
            f"{name} has {actual} bytes instead of {record.nbytes}: it is cut off or belongs to "
            "another model; compile the model again"
        )
        return Check(f"file {name}", False, detail)
    return Check(f"file {name}", True, f"{actual} bytes")


def _check_hash(artifact: Artifact, name: str) -> Check:
    record = artifact.manifest.files[name]
    if name == WEIGHTS_FILE:
        return Check(f"hash {name}", True, "by tensor")
    actual = file_hash(artifact.folder / name)
    if actual != record.sha256:
        detail = (
            f"{name} is not the file that the manifest describes (SHA-256 {actual[:12]} instead of "
            f"{record.sha256[:12]}): it was changed or belongs to another model; compile the "
            "model again"
        )
        return Check(f"hash {name}", False, detail)
    return Check(f"hash {name}", True, actual[:12])


def _check_library(artifact: Artifact) -> list[Check]:
    for name in (LIBRARY_FILE, WEIGHTS_FILE):
        if name not in artifact.manifest.files:
            return [Check(f"file {name}", False, f"the manifest doesn't list {name}")]
    return [_check_hash(artifact, LIBRARY_FILE)]


def _check_table(artifact: Artifact) -> list[Check]:
    """Whether weights.bin is the one that the manifest was written with."""
    manifest = artifact.manifest
    try:
        found, digest = read_table(artifact.weights_file)
    except ArtifactError as error:
        return [Check("weight table", False, str(error))]
    if digest == manifest.weights_digest:
        return [Check("weight table", True, f"{len(manifest.weights)} tensors, {digest[:12]}")]
    expected = weight_table(manifest.weights, manifest.weight_hashes)
    detail = (
        f"{WEIGHTS_FILE} belongs to another model: {describe_mismatch(expected, found)}; compile "
        "the model again"
    )
    return [Check("weight table", False, detail)]


def _check_weights(artifact: Artifact, progress: Callable[[int, int], None] | None) -> list[Check]:
    manifest = artifact.manifest
    total, done = data_end(manifest.weights), 0
    checks = []
    for weight in manifest.weights:
        actual = hashlib.sha256(artifact.stored(weight.name).data).hexdigest()
        done += weight.nbytes
        if progress is not None:
            progress(done, total)
        what = f"{weight.dtype} {list(weight.shape)} at {weight.offset}"
        good = actual == manifest.weight_hashes[weight.name]
        detail = what if good else f"{what}: its bytes have changed; compile the model again"
        checks.append(Check(f"weight {weight.name}", good, detail))
    return checks
