"""BEHAVIOURS, Files, through the whole product."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bessemer import api
from bessemer.cli import main
from bessemer.compile_options import CompileOptions
from bessemer.runtime.model import Model
from tests.behaviours.forked import Child, command_line
from tests.behaviours.models import (
    build,
    save_folder,
    scripted,
    stepwise,
    text_model,
)
from tests.e2e.compiled import F32_ERROR, error, reference, token_ids

LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards; says `a`."""
    folder = tmp_path_factory.mktemp("files") / "checkpoint"
    return save_folder(folder, scripted(text_model(num_hidden_layers=1), b"a"), shard="60KB")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) >= 2
    return found


def cut(folder: Path) -> str:
    shard = shards(folder)[0]
    data = shard.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    shard.write_bytes(data[:-64])
    return f"{shard.name}.*{last}"


def pointer(folder: Path) -> str:
    shard = shards(folder)[1]
    shard.write_bytes(LFS_POINTER)
    return f"{shard.name}.*(LFS|pointer)"


def long_header(folder: Path) -> str:
    shard = shards(folder)[0]
    shard.write_bytes((2**63 - 1).to_bytes(8, "little") + shard.read_bytes()[8:])
    return shard.name


def no_shard(folder: Path) -> str:
    shard = shards(folder)[1]
    shard.unlink()
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first = min(name for name, file in names.items() if file == shard.name)
    return f"{shard.name}.*{first}"


def no_embedding(folder: Path) -> str:
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = folder / names["model.embed_tokens.weight"]
    rest = {k: v for k, v in load_file(shard).items() if k != "model.embed_tokens.weight"}
    save_file(rest, shard, {"format": "pt"})
    return f"{shard.name}.*model.embed_tokens.weight"


def config_of_another(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": 0}))
    return "config.json"


def tiny_gguf(folder: Path) -> str:
    for file in folder.iterdir():
        file.unlink()
    (folder / "model.gguf").write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + bytes(16))
    return "no architecture"


DAMAGE = [cut, pointer, long_header, no_shard, no_embedding, config_of_another, tiny_gguf]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
def test_l01_l03_l06_damaged_checkpoints(
    damage: Callable[[Path], str],
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line on standard error that names the file and the tensor, exit code 1, nothing made."""
    message = damage(folder)
    assert main(["compile", str(folder), "-o", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().err
    lines = [line for line in shown.splitlines() if line.startswith("bessemer: error: ")]
    assert len(lines) == 1, shown
    assert re.search(message, lines[0]), lines[0]
    assert "Traceback" not in shown
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def killed_at_90_percent(stage: str, done: int, total: int) -> None:
    """Progress of a compilation whose process ends when the weights are written so far."""
    if stage == "weights" and done >= 0.9 * total:
        os.kill(os.getpid(), signal.SIGKILL)


def test_l09_killed_at_90_percent(checkpoint: Path, tmp_path: Path) -> None:
    """A real export: absent at first; and over a finished one, that one is still whole."""
    out = tmp_path / "out"

    def killed(context: int) -> None:
        options = CompileOptions(context=context)
        child = Child(
            lambda: api.compile_to(checkpoint, options, out, progress=killed_at_90_percent)
        )
        assert child.wait().returncode == -signal.SIGKILL

    killed(32)
    assert not out.exists()
    assert main(["compile", str(checkpoint), "-o", str(out), "--context", "32"]) == 0
    before = sorted((p.name, p.stat().st_size) for p in out.iterdir())
    killed(48)
    assert sorted((p.name, p.stat().st_size) for p in out.iterdir()) == before
    assert Model.load(out).generate("x", max_tokens=2) == "aa"
    # What the killed ones left behind goes with the next one that finishes.
    assert main(["compile", str(checkpoint), "-o", str(out), "--context", "48"]) == 0
    assert Model.load(out).context_length == 48
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Sets the size that a file of this process may have; writing more fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_l09_a_disk_that_fills_up(
    tmp_path: Path,
    largest_file: Callable[[int], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Writing fails at 90 % of weights.bin, the largest file: an error, and nothing is there."""
    model = text_model(hidden_size=256, intermediate_size=2048)
    folder = save_folder(tmp_path / "model", model)
    nbytes = sum(parameter.numel() * 2 for parameter in model.parameters())
    largest_file(nbytes * 9 // 10)
    assert main(["compile", str(folder), "-o", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().err
    assert "bessemer: writing weights" not in shown
    (line,) = [x for x in shown.splitlines() if x.startswith("bessemer: error: ")]
    assert str(tmp_path / "out") in line
    assert "Traceback" not in shown
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def obey_permissions() -> None:
    """In a process of its own: root may write anywhere only by capabilities, given up here."""
    if os.getuid() != 0:
        return
    version_3, dac_override, dac_read_search = 0x20080522, 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(version_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then those above 31
    if libc.capget(header, sets) == 0:
        sets[0] &= ~(1 << dac_override | 1 << dac_read_search)
        if libc.capset(header, sets) == 0:
            return
    raise OSError(ctypes.get_errno(), "the capabilities can't be given up")


def test_l10_read_only_folders(folder: Path, tmp_path: Path) -> None:
    """The model and the cache can't be written: compiling elsewhere works and the model runs; a
    clear error where the output can't be written, before any work.
    """
    cache, out = tmp_path / "cache", tmp_path / "out"
    cache.mkdir()
    for path in (folder, cache):
        path.chmod(0o555)

    def run(*arguments: object) -> subprocess.CompletedProcess:
        environment = {"XDG_CACHE_HOME": str(cache)}
        return command_line(*arguments, env=environment, before=obey_permissions).wait()

    done = run("compile", folder, "-o", out)
    assert done.returncode == 0, done.stderr
    out.chmod(0o555)
    prompt = ("-p", "x", "--raw", "--max-tokens", 2)
    done = run("run", out, *prompt)
    assert (done.returncode, done.stdout) == (0, "aa\n"), done.stderr
    done = run("run", folder, *prompt)
    assert done.returncode == 1
    assert "XDG_CACHE_HOME" in done.stderr
    done = run("compile", folder, "-o", cache / "no")
    assert done.returncode == 1
    assert "can't be written" in done.stderr
    assert "reading the model" not in done.stderr


def test_l11_widths_that_no_block_divides(tmp_path: Path) -> None:
    """K = 200 as the width of the model and of its MLP: the right tail."""
    model = text_model(hidden_size=200, intermediate_size=14464 // 16, head_dim=16)
    ids = token_ids(20)
    want = reference(model, ids)
    got = stepwise(build(model).session(), ids, 12)
    assert error(got, want) < F32_ERROR
    assert np.isfinite(got).all()
