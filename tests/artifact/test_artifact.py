"""Writing and reading artifacts: round trip, damage, mix-ups, and interrupted writing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bessemer.artifact import folder as folders
from bessemer.artifact.layout import KVLayer, StateLayout
from bessemer.artifact.manifest import Manifest, RopeSwitch
from bessemer.artifact.reader import open_artifact, read_manifest, verify_files
from bessemer.artifact.weight_file import data_end
from bessemer.artifact.writer import BYTES_OF_WEIGHT, OTHER_BYTES
from bessemer.errors import ArtifactError, CompileError
from bessemer.quantize.floats import f16_to_f32, f32_to_bf16, f32_to_f16

from .fakes import WEIGHTS, FakeGenerated, lay_out, native_target, tensors, write_fake

NAMES = ["модель é b", 'it\'s "quoted"', "-dash", "back\\slash", "new\nline"]


def test_round_trip(tmp_path: Path) -> None:
    path = write_fake(
        tmp_path / "out",
        rope=RopeSwitch("longrope", 4096),
        extra_files={"ir/a.mlir": "module {}", "tokenizer.json": b"{}"},
        versions={"bessemer": "1"},
    )
    artifact = open_artifact(path)
    manifest = artifact.manifest
    numbers = tensors()
    assert np.array_equal(artifact.weight("norm"), numbers["norm"])
    assert np.array_equal(artifact.weight("embed"), f16_to_f32(f32_to_f16(numbers["embed"])))
    merged = np.stack([numbers["gate"], numbers["up"]])
    assert np.array_equal(f32_to_bf16(artifact.weight("merged")), f32_to_bf16(merged))
    assert manifest.rope == RopeSwitch("longrope", 4096)
    assert manifest.context_length == 64
    assert manifest.entry_points["forward_decode"] == "_mlir_ciface_forward_decode"
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert set(manifest.files) == {
        "model.so", "libmodel.a", "model.h", "weights.bin", "config.json",
        "ir/a.mlir", "tokenizer.json",
    }  # fmt: skip
    checks = verify_files(artifact)
    assert checks
    assert all(c.ok for c in checks), checks
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_weights_are_written_page_aligned(tmp_path: Path) -> None:
    weights = lay_out(("a", (3,), "f32", "plain"), ("b", (64, 64), "f16", "panels"))
    numbers = {"a": np.ones(3, np.float32), "b": np.ones((64, 64), np.float32)}
    generated = FakeGenerated(weights=weights, expressions={})
    path = write_fake(tmp_path / "out", generated=generated, read=numbers.__getitem__)
    artifact = open_artifact(path)
    assert artifact.manifest.weights[1].offset == 4096
    assert np.array_equal(artifact.weight("b"), numbers["b"])


def test_stored_dtype_is_taken_without_a_detour(tmp_path: Path) -> None:
    bits = np.arange(630, dtype=np.uint16).reshape(70, 9)
    numbers = tensors()
    asked: list[str] = []

    def read_stored(name: str, dtype: str) -> np.ndarray | None:
        asked.append(f"{name} as {dtype}")
        return bits if name == "embed" else None

    path = write_fake(tmp_path / "out", read_stored=read_stored)
    assert asked == ["embed as f16", "norm as f32"]
    artifact = open_artifact(path)
    assert np.array_equal(f32_to_f16(artifact.weight("embed")), bits)
    assert np.array_equal(artifact.weight("norm"), numbers["norm"])


@pytest.mark.parametrize("name", NAMES)
def test_any_folder_name(tmp_path: Path, name: str) -> None:
    path = write_fake(tmp_path / name)
    assert all(c.ok for c in verify_files(open_artifact(path)))


# -- damage and mix-ups (C08) ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.so", "weights.bin", "libmodel.a", "config.json"])
def test_a_cut_file_is_refused_by_size(tmp_path: Path, name: str) -> None:
    path = write_fake(tmp_path / "out")
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[:-3])
    with pytest.raises(ArtifactError, match=f"{name} has {len(data) - 3} bytes instead of"):
        open_artifact(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = write_fake(tmp_path / "out")
    (path / "model.h").unlink()
    with pytest.raises(ArtifactError, match=r"model.h is missing"):
        open_artifact(path)


def test_another_models_library_is_refused(tmp_path: Path) -> None:
    path = write_fake(tmp_path / "a", code=b"one")
    other = write_fake(tmp_path / "b", code=b"two")
    (path / "model.so").write_bytes((other / "model.so").read_bytes())
    with pytest.raises(ArtifactError, match=r"model.so is not the file .* another model"):
        open_artifact(path)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([("embed", (70, 9), "f16", "panels"), ("norm", (9,), "f32", "plain")],
         "the manifest lists 3 tensors and the weight file 2"),
        ([("embed", (70, 9), "bf16", "panels"), ("norm", (9,), "f32", "plain"),
          ("merged", (2, 33, 5), "bf16", "panels")],
         r"'embed': the manifest has dtype f16, the weight file bf16"),
        ([("embed", (71, 9), "f16", "panels"), ("norm", (9,), "f32", "plain"),
          ("merged", (2, 33, 5), "bf16", "panels")],
         r"'embed': the manifest has shape \[70, 9\], the weight file \[71, 9\]"),
        ([("embed", (70, 9), "f16", "panels"), ("norm", (9,), "f32", "plain"),
          ("merged", (2, 33, 5), "bf16", "panels")],
         r"'embed': the manifest has hash"),
    ],
)  # fmt: skip
def test_another_models_weights_are_refused(
    tmp_path: Path, specs: list[tuple], message: str
) -> None:
    path = write_fake(tmp_path / "a")
    numbers = {**tensors(1), "embed": np.ones(specs[0][1], np.float32)}
    other = write_fake(
        tmp_path / "b",
        generated=FakeGenerated(weights=lay_out(*specs)),
        read=numbers.__getitem__,
    )
    (path / "weights.bin").write_bytes((other / "weights.bin").read_bytes())
    with pytest.raises(ArtifactError, match=message):
        open_artifact(path)


def test_a_flipped_weight_byte_is_found_by_verify(tmp_path: Path) -> None:
    path = write_fake(tmp_path / "out")
    data = bytearray((path / "weights.bin").read_bytes())
    data[10] ^= 1
    (path / "weights.bin").write_bytes(data)
    bad = [c for c in verify_files(open_artifact(path)) if not c.ok]
    assert [c.name for c in bad] == ["weight embed"]
    assert "changed" in bad[0].detail


def test_a_damaged_weight_table_is_refused(tmp_path: Path) -> None:
    path = write_fake(tmp_path / "out")
    data = bytearray((path / "weights.bin").read_bytes())
    data[-60] ^= 1
    (path / "weights.bin").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"table of tensors is damaged"):
        open_artifact(path)
    data[-40:-32] = (1 << 60).to_bytes(8, "little")
    (path / "weights.bin").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"damaged at its end"):
        open_artifact(path)


def edit(path: Path, *keys: object, value: object) -> None:
    data = json.loads((path / "manifest.json").read_text())
    at = data
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    (path / "manifest.json").write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("format", "version"), 99, "format version 99"),
        (("format", "name"), "web app", "belongs to 'web app'"),
        (("weights", 0, "offset"), 1 << 40, "ABI hash"),
        (("weights", 0, "offset"), -64, "an offset is -64"),
        (("weights", 0, "offset"), 3, "offset or size"),
        (("weights", 0, "nbytes"), 64, "offset or size"),
        (("weights", 0, "dtype"), "f99", "unknown storage f99"),
        (("weights", 2, "offset"), 0, "overlaps"),
        (("weights", 0, "name"), "norm", "two of that name"),
        (("weights", 1, "layout"), "panels", "panels of shape"),
        (("weights", 0, "shape"), "x", "damaged"),
        (("state", "capacity"), 0, "state layout"),
        (("state", "capacity"), 128, "ABI hash"),
        (("state", "layers", 0, "kv_heads"), 3, "ABI hash"),
        (("scratch", "thread_bytes"), 0, "ABI hash"),
        (("model", "vocab_size"), 71, "ABI hash"),
        (("model", "rope"), {"kind": "other", "threshold": 3}, "rope kind"),
        (("abi", "entry_points"), {}, "forward_prefill"),
        (("files",), None, "damaged"),
    ],
)
def test_a_manifest_that_was_tampered_with(
    tmp_path: Path, keys: tuple, value: object, message: str
) -> None:
    path = write_fake(tmp_path / "out")
    edit(path, *keys, value=value)
    with pytest.raises(ArtifactError, match=message):
        open_artifact(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", "[" * 100000, '{"format": 3}'])
def test_a_manifest_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"is not the manifest of a compiled|it is no JSON"):
        read_manifest(tmp_path)


def test_no_artifact_at_all(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"has no manifest.json.*bessemer compile"):
        open_artifact(tmp_path)
    with pytest.raises(ArtifactError, match="does not exist"):
        open_artifact(tmp_path / "nothing")


# -- the machine (C10) ----------------------------------------------------------------------------


def test_a_cpu_that_lacks_a_feature(tmp_path: Path) -> None:
    path = write_fake(tmp_path / "out", required_features=["no-such-feature"])
    with pytest.raises(ArtifactError, match=r"CPU with no-such-feature.*--cpu baseline"):
        open_artifact(path)
    assert open_artifact(path, check_cpu=False).manifest.name == "fake"


def test_another_architecture_or_system(tmp_path: Path) -> None:
    target = {**native_target(), "triple": "sparc-unknown-linux-gnu"}
    path = write_fake(tmp_path / "a", target=target)
    with pytest.raises(ArtifactError, match=r"compiled for sparc"):
        open_artifact(path)
    triple = native_target()["triple"].split("-")[0] + "-pc-plan9"
    path = write_fake(tmp_path / "b", target={"triple": triple})
    with pytest.raises(ArtifactError, match=r"this system is"):
        open_artifact(path)


# -- writing (L09, L10) ---------------------------------------------------------------------------


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = write_fake(tmp_path / "out", code=b"good")

    def read(name: str) -> np.ndarray:
        if name != "embed":
            raise OSError(28, "No space left on device")
        return tensors(1)[name]

    with pytest.raises(ArtifactError, match=r"No space left on device.*nothing was changed"):
        write_fake(path, code=b"new", read=read)
    assert (path / "model.so").read_bytes() == b"good"
    open_artifact(path)
    with pytest.raises(ArtifactError, match=r"No space left"):
        write_fake(tmp_path / "fresh", read=read)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_weight_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    big = {**tensors(), "embed": np.full((70, 9), 1e6, np.float32)}
    with pytest.raises(CompileError, match="embed"):
        write_fake(tmp_path / "out", read=big.__getitem__)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full")
def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.artifact import writer

    real = writer.write_weights

    def on_full_disk(stream: object, *rest: object) -> object:
        with open("/dev/full", "r+b", buffering=0) as full:
            os.dup2(full.fileno(), stream.fileno())
            return real(stream, *rest)

    monkeypatch.setattr(writer, "write_weights", on_full_disk)
    with pytest.raises(ArtifactError, match=r"[Nn]o space left"):
        write_fake(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_with_too_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights are read; with room for them and what comes behind, nothing is refused."""
    code = 3 * 10**6
    needed = data_end(WEIGHTS) + OTHER_BYTES + BYTES_OF_WEIGHT * len(WEIGHTS) + code

    def code_bytes(folder: Path) -> int:
        return code

    def read(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed - 10**6))
    where = re.escape(str(tmp_path))
    words = rf"out needs 4.1 MB and {where} has 3.1 MB free: .* for 1.0 MB .*-o"
    with pytest.raises(ArtifactError, match=words):
        write_fake(tmp_path / "out", read=read, code_bytes=code_bytes)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=needed))
    write_fake(tmp_path / "out", code_bytes=code_bytes)


KILLED = """
import os, sys, time
from pathlib import Path
sys.path.append(sys.argv[2])
from tests.artifact import fakes
numbers = fakes.tensors()
def read(name):
    if name == "up":  # needed for the last weight
        print("now", flush=True)
        time.sleep(60)
    return numbers[name]
fakes.write_fake(Path(sys.argv[1]), read=read, code=b"new")
"""


@pytest.mark.parametrize("existing", [False, True])
def test_kill_9_leaves_it_whole_or_absent(tmp_path: Path, existing: bool) -> None:
    path = tmp_path / "out"
    if existing:
        write_fake(path, code=b"old")
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", KILLED, str(path), tests]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"now\n"
        # While it lives, its folder is not taken for a left-over.
        folders.remove_stale(path)
        assert [p for p in tmp_path.iterdir() if ".tmp-" in p.name]
        process.send_signal(signal.SIGKILL)
    if existing:
        assert (open_artifact(path).folder / "model.so").read_bytes() == b"old"
    else:
        assert not path.exists()
    write_fake(path, code=b"next")
    assert (path / "model.so").read_bytes() == b"next"
    assert not [p for p in tmp_path.iterdir() if ".tmp-" in p.name]


def test_an_artifact_moved_aside_comes_back(tmp_path: Path) -> None:
    path = write_fake(tmp_path / "out")
    path.rename(tmp_path / ".out.old-123")
    folders.remove_stale(path)
    open_artifact(path)


def test_replacing_without_an_exchange_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
    path = write_fake(tmp_path / "out", code=b"old")
    write_fake(path, code=b"new")
    assert (path / "model.so").read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_finished_one_stays_if_asked(tmp_path: Path) -> None:
    path = write_fake(tmp_path / "out", code=b"first")
    write_fake(path, code=b"second", replace=False)
    assert (path / "model.so").read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_only_artifacts_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"not empty and not a Bessemer artifact"):
        write_fake(tmp_path / "photos")
    (tmp_path / "photos" / "manifest.json").write_text('{"name": "a web extension"}')
    with pytest.raises(ArtifactError, match=r"not empty and not a Bessemer artifact"):
        write_fake(tmp_path / "photos")
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"is a file"):
        write_fake(tmp_path / "file")
    with pytest.raises(ArtifactError, match=r"is no folder"):
        folders.check_destination(tmp_path / "file" / "below")
    assert (tmp_path / "photos" / "cat.jpg").read_bytes() == b"x"
    (tmp_path / "empty").mkdir()
    open_artifact(write_fake(tmp_path / "empty"))


def test_files_beside_an_artifact_are_not_lost(tmp_path: Path) -> None:
    made = write_fake(tmp_path / "out", code=b"old")
    write_fake(made, code=b"new")  # by itself it is replaced
    (made / "notes").mkdir()
    (made / "notes" / "mine.md").write_text("note")
    with pytest.raises(ArtifactError, match=r"beside the compiled model's \(notes/mine.md\)"):
        write_fake(made, code=b"newer")
    assert (made / "notes" / "mine.md").read_text() == "note"
    assert (made / "model.so").read_bytes() == b"new"


def test_a_link_is_followed(tmp_path: Path) -> None:
    real = write_fake(tmp_path / "real", code=b"old")
    (tmp_path / "link").symlink_to(real)
    write_fake(tmp_path / "link", code=b"new")
    assert (tmp_path / "link").is_symlink()
    assert (real / "model.so").read_bytes() == b"new"


def test_an_output_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests may run as root, whom no permission stops.
    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ArtifactError, match=r"no folder can be made in.*-o.*XDG_CACHE_HOME"):
        folders.check_destination(tmp_path / "out")


def test_the_current_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", str(tmp_path / "here")):
        with pytest.raises(ArtifactError, match=r"the folder you are in"):
            folders.check_destination(Path(name))
    folders.check_destination(Path("below"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "here"]


def test_paths_stay_inside(tmp_path: Path) -> None:
    for path in ("../out", "/etc/x", "ir/../../x"):
        with pytest.raises(ValueError, match="no path inside"):
            write_fake(tmp_path / "out", extra_files={path: "x"})


def test_progress_counts_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = write_fake(tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    total = sum(w.nbytes for w in open_artifact(path).manifest.weights)
    assert seen[-1] == (total, total)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


def test_many_writers_of_one_place(tmp_path: Path) -> None:
    script = KILLED.replace("time.sleep(60)", "pass")
    tests = str(Path(__file__).parents[1])
    commands = [[sys.executable, "-c", script, str(tmp_path / "out"), tests] for _ in range(4)]
    running = [subprocess.Popen(c, stdout=subprocess.DEVNULL) for c in commands]
    assert [p.wait(60) for p in running] == [0] * 4
    assert all(c.ok for c in verify_files(open_artifact(tmp_path / "out")))
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_opening_does_not_read_the_weights(tmp_path: Path) -> None:
    state = StateLayout((KVLayer(0, 1, 4, 4, 0),), "f16", 64, 16)
    weights = lay_out(("w", (4096, 4096), "f32", "panels"))
    generated = FakeGenerated(weights=weights, expressions={}, state=state)
    numbers = np.ones((4096, 4096), np.float32)
    path = write_fake(tmp_path / "out", generated=generated, read=lambda name: numbers)
    began = time.process_time()
    open_artifact(path)
    opening = time.process_time() - began
    began = time.process_time()
    verify_files(open_artifact(path))
    assert opening < time.process_time() - began
