"""Sessions of the C API that are copied, saved and restored, as Python's, in the same files."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.artifact.layout import (
    CompressedStream,
    KVLayer,
    NamedState,
    SharedLayer,
    StateLayout,
)
from bessemer.artifact.manifest import RopeSwitch
from bessemer.artifact.reader import open_artifact
from bessemer.codegen.description import Variant, WeightFile, emit_description
from bessemer.errors import UsageError
from bessemer.runtime.engine import Engine
from bessemer.runtime.session import Session
from bessemer.runtime.state import filled
from tests.embedding import c_api
from tests.embedding.c_api import Api, CError, CModel
from tests.embedding.test_sessions import refused, same, text
from tests.embedding.toys import write_c_toy
from tests.runtime import toy

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "named": {"named": True},
    "rope": {"rope": RopeSwitch("dynamic", 40)},
}


class Both:
    """One toy, for C and for Python."""

    def __init__(self, folder: Path, **options: Any) -> None:
        path = write_c_toy(folder / "toy", **options)
        self.c = CModel(Api(path / "model.so"), path, threads=2)
        self.python = Engine.load(open_artifact(path), 2)


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Both]:
    return {name: Both(tmp_path_factory.mktemp(name), **how) for name, how in KINDS.items()}


def numbers(text: str, array: str) -> list[list[int]]:
    """The rows of an array of a description."""
    block = re.findall(rf" {array}\[\] = \{{\n(.*?)\}};", text, re.DOTALL)[0]
    return [[int(n) for n in re.findall(r"\d+", line)] for line in block.splitlines()]


def test_what_is_held() -> None:
    """The table of every kind of entry names the bytes that the session in Python copies."""
    layers = (KVLayer(0, 3, 8, 4, 0), KVLayer(1, 1, 8, 8, 5))
    streams = (CompressedStream(3, "kv", 8, 4, True), CompressedStream(4, "index", 8, 16, False))
    states = (NamedState("a", "i64", (3,)), NamedState("b", "f32", (5, 2), given=True))
    layout = StateLayout(
        layers, "f16", 200, 16, named=states, shared=(SharedLayer(2, 8, 7),), streams=streams
    )
    generated: Any = replace(toy.toy_generated(), state=layout)
    table = emit_description(generated, "x", "y", [Variant(())], WeightFile("0" * 64, 0))
    parts, named = numbers(table, "parts"), numbers(table, "named_states")
    assert [given for _, _, given in named] == [0, 1]
    memory = np.random.default_rng(1).integers(0, 256, layout.nbytes, np.uint8)
    header = layout.header().view(np.uint8)
    memory[: len(header)] = header
    for high_water in range(201):
        stretches = []
        for offset, copies, stride, rate, rows, block_rows, block_bytes in parts:
            nbytes = -(-min(rows, high_water // rate) // block_rows) * block_bytes
            stretches += [(offset + copy * stride, nbytes) for copy in range(copies)]
        stretches += [(offset, nbytes) for offset, nbytes, _ in named]
        got = b"".join(memory[at : at + nbytes].tobytes() for at, nbytes in stretches)
        assert got == b"".join(part.tobytes() for part in filled(layout, memory, high_water))


@pytest.mark.parametrize("count", [0, 5, 33, 200])
@pytest.mark.parametrize("kind", ["plain", "named"])
def test_a_copy_goes_its_own_way(toys: dict[str, Both], kind: str, count: int) -> None:
    session, named = toys[kind].c.session(), kind == "named"
    ids = text(count)
    if ids:
        session.prefill(ids)
    other = session.fork()
    assert other.tokens == ids
    if ids:
        assert other.sample() == session.sample()
    same(other.prefill([1, 2]), [*ids, 1, 2], named)
    same(session.decode(3), [*ids, 3], named)
    session.destroy()
    same(other.decode(4), [*ids, 1, 2, 4], named)


@pytest.mark.parametrize("keep", [0, 50, 190, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_python(
    toys: dict[str, Both], kind: str, keep: int, tmp_path: Path
) -> None:
    """The same bytes, and each reads the other's."""
    ours, theirs = toys[kind].c.session(), Session(toys[kind].python)
    ids, ending = text(200), {"c": ours, "python": theirs}
    for name, session in ending.items():
        session.prefill(ids)
        session.rewind(keep)
        session.save(tmp_path / name)
    assert (tmp_path / "c").read_bytes() == (tmp_path / "python").read_bytes()
    fresh, other = toys[kind].c.session(), Session(toys[kind].python)
    for session, name in ((fresh, "python"), (other, "c")):
        session.prefill([9, 9, 9])
        session.load(tmp_path / name)
        assert session.tokens == ids[:keep]
    assert fresh.logits is None
    np.testing.assert_array_equal(fresh.decode(2), other.decode(2))
    if kind != "rope":
        same(other.decode(3), [*ids[:keep], 2, 3], kind == "named")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "python"]


def test_files_that_are_not_right(toys: dict[str, Both], tmp_path: Path) -> None:
    session = toys["plain"].c.session()
    session.prefill(text(20))
    path = tmp_path / "kept"
    session.save(path)
    data = path.read_bytes()
    cases = {data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (3, 60, len(data) - 5)}
    cases |= {data[:cut] for cut in (0, 10, 100, len(data) - 1)} | {data + b"x"}
    for changed in cases:
        path.write_bytes(changed)
        refused(c_api.SESSION, "damaged|no saved session", lambda: session.load(path))
    path.write_bytes(data)
    longer = Both(tmp_path, capacity=128).c.session()
    refused(c_api.SESSION, "is a session of another model than toy", lambda: longer.load(path))
    (tmp_path / "bias").mkdir()
    bias = Both(tmp_path / "bias", bias=np.ones(toy.VOCAB, np.float32)).c.session()
    refused(c_api.SESSION, "session of toy with other weights", lambda: bias.load(path))
    refused(c_api.FILE, "can't be read: No such", lambda: session.load(tmp_path / "nothing"))
    refused(c_api.FILE, "is no file", lambda: session.load(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    refused(c_api.FILE, "is no file", lambda: session.load(tmp_path / "pipe"))
    refused(c_api.FILE, "can't be written: No", lambda: session.save(tmp_path / "no" / "folder"))
    refused(c_api.FILE, "can't be written", lambda: session.save(tmp_path))
    assert not [name for name in tmp_path.iterdir() if "session" in name.name]
    assert session.position == 20
    same(session.decode(1), [*text(20), 1])


@pytest.mark.parametrize("language", ["c", "python"])
def test_links_are_followed(toys: dict[str, Both], language: str, tmp_path: Path) -> None:
    """The file that they lead to is written, whether it is there or not; they stay."""
    both = toys["plain"]
    session = both.c.session() if language == "c" else Session(both.python)
    kept, near, far = tmp_path / "far" / "kept", tmp_path / "far" / "near", tmp_path / "link"
    whole = tmp_path / "whole"
    kept.parent.mkdir()
    near.symlink_to("kept")
    far.symlink_to(Path("far") / "near")
    whole.symlink_to(near)
    for count, link in enumerate((far, whole, near), 1):
        session.prefill([5])
        session.save(link)
        assert all(path.is_symlink() for path in (far, near, whole))
        assert not kept.is_symlink()
        other = Session(both.python)
        other.load(kept)
        assert other.tokens == [5] * count
    assert {path.name for path in (*tmp_path.iterdir(), *kept.parent.iterdir())} == {
        "far", "kept", "link", "near", "whole",
    }  # fmt: skip


@pytest.mark.parametrize("language", ["c", "python"])
def test_only_files_are_replaced(toys: dict[str, Both], language: str, tmp_path: Path) -> None:
    both = toys["plain"]
    session = both.c.session() if language == "c" else Session(both.python)
    session.prefill(text(20))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for link, target in {"to a pipe": "pipe", "to a folder": "folder", "loop": "loop"}.items():
        (tmp_path / link).symlink_to(target)
    before = {path.name: path.lstat().st_ino for path in tmp_path.iterdir()}
    reasons = {
        "pipe": "it is no regular file",
        "to a pipe": "it is no regular file",
        "folder": "Is a directory",
        "to a folder": "Is a directory",
        "loop": "Too many levels of symbolic links",
        "pipe/x": "Not a directory",
    }
    for name, reason in reasons.items():
        path = tmp_path / name
        with pytest.raises((CError, UsageError)) as caught:
            session.save(path)
        assert str(caught.value) == f"{path} can't be written: {reason}"
    for name in ("pipe", "to a pipe", "folder"):
        with pytest.raises((CError, UsageError), match=f"{name} is no file"):
            session.load(tmp_path / name)
    assert {path.name: path.lstat().st_ino for path in tmp_path.iterdir()} == before
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
    assert session.position == 20


def test_a_full_disk(toys: dict[str, Both], tmp_path: Path) -> None:
    """Nothing half written stays, and what was there does."""
    import resource
    import signal

    path = tmp_path / "kept"
    session = toys["plain"].c.session()
    session.prefill(text(20))
    session.save(path)
    before = path.read_bytes()
    session.prefill(text(200))
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.SIGXFSZ
    ignored = signal.signal(handler, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        refused(c_api.FILE, "can't be written: File too large", lambda: session.save(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(handler, ignored)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_null_arguments(toys: dict[str, Both]) -> None:
    session = toys["plain"].c.session()
    api, error = session.api, c_api.Error()
    assert api.session_copy(session.handle, None, error) == c_api.ARGUMENT
    assert api.session_save(session.handle, None, error) == c_api.ARGUMENT
    assert api.session_load(session.handle, None, error) == c_api.ARGUMENT
    assert api.session_save(None, b"x", error) == c_api.ARGUMENT
    assert b"session must not be NULL" in error.message
    for name in ("save", "load"):
        assert getattr(api, f"session_{name}")(session.handle, b"", error) == c_api.ARGUMENT
        assert error.message == f"bsm_session_{name}: path is empty".encode()
    assert api.prefill(session.handle, None, 3, error) == c_api.ARGUMENT
    assert error.message == b"the token ids must not be NULL"


def test_models_that_can_t_be_steered(toys: dict[str, Both]) -> None:
    session = toys["named"].c.session()
    assert session.api.info.steering_layers == 0
    refused(c_api.ARGUMENT, "toy was compiled without steering", lambda: session.steer(None))
