"""Opening a model by the C API: what is checked, what is refused, and in which words."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bessemer.artifact.layout import CompressedStream, KVLayer, SharedLayer, StateLayout
from bessemer.artifact.manifest import WEIGHTS_FILE
from bessemer.artifact.reader import read_manifest
from bessemer.artifact.weight_file import FOOTER
from bessemer.codegen.description import Variant, WeightFile, emit_description
from bessemer.runtime.cpu import default_threads, host_features
from bessemer.runtime.state import Held, usable
from tests.embedding import c_api
from tests.embedding.c_api import Api, CError, CModel
from tests.embedding.toys import write_c_toy
from tests.runtime.toy import VOCAB, expected, toy_generated


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_c_toy(tmp_path_factory.mktemp("toy") / "toy")


@pytest.fixture(scope="module")
def api(folder: Path) -> Api:
    return Api(folder / "model.so")


@pytest.fixture
def weights(folder: Path, tmp_path: Path) -> Path:
    """A copy of the weight file, to be spoilt."""
    return Path(shutil.copy(folder / WEIGHTS_FILE, tmp_path / "some.bin"))


def refused(api: Api, path: Path, status: int, words: str, **options: object) -> None:
    with pytest.raises(CError, match=words) as caught:
        CModel(api, path, **options)
    assert caught.value.status == status


def works(model: CModel) -> None:
    np.testing.assert_array_equal(model.session().prefill([1, 2, 3]), expected([1, 2, 3]))


@pytest.mark.parametrize("mode", [c_api.AUTO, c_api.MAP, c_api.HUGE])
def test_a_file_or_its_folder_mapped_or_read(api: Api, folder: Path, mode: int) -> None:
    for path in (folder, folder / WEIGHTS_FILE):
        works(CModel(api, path, weights_mode=mode))


def test_the_library_and_the_manifest_say_the_same(api: Api, folder: Path) -> None:
    info, manifest = api.info, read_manifest(folder)
    assert info.name == b"toy"
    assert info.target.decode() == manifest.target["triple"]
    assert info.abi_hash.decode() == manifest.abi_hash
    assert info.weights_hash.decode() == manifest.weights_digest
    assert info.weights_file_bytes == manifest.files[WEIGHTS_FILE].nbytes
    assert (info.vocab_size, info.context_length) == (manifest.vocab_size, manifest.context_length)
    assert (info.hidden_size, info.chunk) == (manifest.hidden_size, manifest.state.chunk)
    assert info.state_bytes == manifest.state.nbytes
    assert info.scratch_shared_bytes == manifest.scratch.shared_bytes
    assert info.scratch_thread_bytes == manifest.scratch.thread_bytes


def test_any_name(tmp_path: Path) -> None:
    """In C strings and comments, whatever a model is called."""
    name = 'a "b" \\ ??/ */ //\t%s é字1\n2'
    folder = write_c_toy(tmp_path / "toy", name=name, variants=(Variant(("warp9",)),))
    api = Api(folder / "model.so")
    assert api.info.name.decode() == name
    refused(api, folder, c_api.CPU, re.escape(f"{name} was compiled for a processor"))
    assert (folder / "model.h").read_text().splitlines()[0].endswith("2: compiled by Bessemer. */")


def test_rings_of_the_state() -> None:
    """What the table says of them gives what the session in Python asks of the layout."""
    layers = (KVLayer(0, 1, 8, 8, 0), KVLayer(1, 1, 8, 8, 5), KVLayer(2, 1, 8, 8, 5))
    streams = (CompressedStream(4, "kv", 8, 4, True), CompressedStream(5, "kv", 8, 16, False))
    layout = StateLayout(layers, "f32", 200, 16, shared=(SharedLayer(3, 8, 7),), streams=streams)
    generated: Any = replace(toy_generated(), state=layout)
    text = emit_description(generated, "x", "y", [Variant(())], WeightFile("0" * 64, 0))
    block = re.findall(r"bsm_ring rings\[\] = \{\n(.*?)\};", text, re.DOTALL)[0]
    rings = [tuple(map(int, re.findall(r"\d+", line))) for line in block.splitlines()]
    assert len(rings) == 4  # equal layers are one

    def by_table(keep: int, high_water: int) -> int:
        for rate, reach, rows in rings:
            needed = max(0, keep // rate * rate + rate - reach)
            if needed < keep and high_water - rows > needed:
                return 0
        return keep

    for high_water in range(0, 201, 7):
        for keep in range(high_water + 1):
            held = Held(keep, keep, high_water)
            assert by_table(keep, high_water) == usable(layout, held, keep, 0)


def test_the_header_s_hash(api: Api, folder: Path) -> None:
    digest = read_manifest(folder).abi_hash
    assert f'#define BSM_ABI_HASH "{digest}"' in (folder / "model.h").read_text()
    works(CModel(api, folder, abi_hash=digest.encode()))
    other = hashlib.sha256(b"other").hexdigest()
    refused(
        api,
        folder,
        c_api.HEADER,
        f"model.h of another model.*{other[:12]}",
        abi_hash=other.encode(),
    )


def test_another_model_s_weights(api: Api, tmp_path: Path) -> None:
    """Same shapes and other numbers, and other shapes."""
    bias = np.ones(VOCAB, np.float32)
    other = write_c_toy(tmp_path / "other", bias=bias)
    refused(api, other, c_api.WEIGHTS, "belongs to another model .* use the weights.bin")
    works_there = CModel(Api(other / "model.so"), other)
    assert works_there.session().prefill([1])[0] == expected([1])[0] + 1
    table = (tmp_path / "other" / WEIGHTS_FILE).read_bytes()
    (tmp_path / "longer.bin").write_bytes(bytes(4096) + table)
    refused(api, tmp_path / "longer.bin", c_api.WEIGHTS, "belongs to another model")


Spoil = Callable[[bytes], bytes]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda b: b"", "0 bytes instead of"),
        (lambda b: b[:50], "50 bytes instead of"),
        (lambda b: b[: FOOTER.size], "instead of"),
        (lambda b: b[-FOOTER.size :], "instead of"),
        (lambda b: b[:-1], "instead of .* it is cut off"),
        (lambda b: b + b"x", "instead of"),
        (lambda b: b[:4096], "4096 bytes instead of"),
        (lambda b: bytes(len(b)), "is no weight file .* or its end is cut off"),
        (lambda b: bytes(4096) + b, "instead of"),
        (lambda b: b[4096:], "instead of"),
        (lambda b: b[: -FOOTER.size - 5] + b"?" + b[-FOOTER.size - 4 :], "table .* is damaged"),
        (lambda b: b[: -FOOTER.size] + b"BSMWTS02" + b[-FOOTER.size + 8 :], "is no weight file"),
        (lambda b: b[:-40] + b"\xff" * 8 + b[-32:], "damaged at its end"),
        (lambda b: b[:-40] + bytes(8) + b[-32:], "damaged at its end"),
        (lambda b: b[:-1] + bytes([b[-1] ^ 1]), "belongs to another model"),
    ],
)
def test_damaged_weights(api: Api, weights: Path, spoil: Spoil, words: str) -> None:
    weights.write_bytes(spoil(weights.read_bytes()))
    for mode in (c_api.MAP, c_api.HUGE):
        refused(api, weights, c_api.WEIGHTS, words, weights_mode=mode)


def test_files_that_can_t_be_read(api: Api, tmp_path: Path) -> None:
    refused(api, tmp_path / "nothing", c_api.FILE, "nothing can't be read: No such file")
    refused(api, tmp_path, c_api.FILE, "weights.bin can't be read: No such file")
    (tmp_path / WEIGHTS_FILE).mkdir()
    refused(api, tmp_path, c_api.FILE, "is no file")
    refused(api, Path("/dev/null"), c_api.FILE, "is no file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(api: Api, weights: Path) -> None:
    weights.chmod(0)
    refused(api, weights, c_api.FILE, "Permission denied")


def test_long_names_are_cut_in_messages_at_a_character(api: Api, tmp_path: Path) -> None:
    for length in (236, 237, 238):  # the cut falls on each byte of a character in turn
        path = tmp_path / ("é" * 100 + "x" * (length % 3)) / ("字" * 80) / ("字" * 80)
        with pytest.raises(CError) as caught:
            CModel(api, path)
        assert 400 < len(str(caught.value).encode()) < 500


def test_threads(api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BESSEMER_THREADS", raising=False)
    for threads in (1, 3):
        assert api.threads(CModel(api, folder, threads=threads).handle) == threads
    assert api.threads(CModel(api, folder).handle) == default_threads()
    for bad in (-1, 1025):
        refused(api, folder, c_api.ARGUMENT, "threads must be .* from 1 to 1024", threads=bad)
    # Python's os.environ sets the C library's environment.
    monkeypatch.setenv("BESSEMER_THREADS", "5")
    assert api.threads(CModel(api, folder).handle) == 5
    assert api.threads(CModel(api, folder, threads=2).handle) == 2
    for bad_text in ("0", "-1", "x", "2x", " 2", "99999999999999999999", "1025"):
        monkeypatch.setenv("BESSEMER_THREADS", bad_text)
        refused(api, folder, c_api.ARGUMENT, "BESSEMER_THREADS must be")


def test_weights_mode(api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BESSEMER_WEIGHTS", "map")
    works(CModel(api, folder))
    monkeypatch.setenv("BESSEMER_WEIGHTS", "fast")
    refused(api, folder, c_api.ARGUMENT, "BESSEMER_WEIGHTS is 'fast': it must be auto, map or huge")
    works(CModel(api, folder, weights_mode=c_api.MAP))
    refused(api, folder, c_api.ARGUMENT, "weights_mode is 3", weights_mode=3)


def test_null_arguments(api: Api, folder: Path) -> None:
    error = c_api.Error()
    assert api.open(None, None, ctypes.byref(ctypes.c_void_p()), error) == c_api.ARGUMENT
    assert b"must not be NULL" in error.message
    assert api.open(bytes(folder), None, None, None) == c_api.ARGUMENT
    assert api.open(b"", None, ctypes.byref(ctypes.c_void_p()), error) == c_api.ARGUMENT
    assert error.message == b"bsm_open: path is empty"


def test_every_function_takes_null(folder: Path) -> None:
    """All that the headers declare: an error where a status is returned, and nothing is harmed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.embedding.null_calls", str(folder)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    found = json.loads(done.stdout)
    assert {"bsm_open", "bsm_steer", "bsm_sampler_pick"} <= set(found["null"])
    assert set(found["null"].values()) == {c_api.ARGUMENT}
    # Token 0 is one, and 0 tokens may be kept.
    good = {"bsm_decode", "bsm_rewind"}
    for name, status in found["handle"].items():
        assert status == (c_api.OK if name in good else c_api.ARGUMENT), name
    assert good | {"bsm_session_create", "bsm_sampler_pick"} <= set(found["handle"])


def test_a_processor_that_lacks_something(tmp_path: Path) -> None:
    folder = write_c_toy(tmp_path / "toy", variants=(Variant(("warp9",)),))
    words = r"toy was compiled for a processor \(.*\) with warp9, which this one lacks"
    refused(Api(folder / "model.so"), folder, c_api.CPU, words)


def test_the_best_level_that_the_processor_has(tmp_path: Path) -> None:
    variants = (Variant(("warp9",)), Variant(tuple(sorted(known_here()))), Variant(()))
    folder = write_c_toy(tmp_path / "toy", variants=variants)
    works(CModel(Api(folder / "model.so"), folder))


def known_here() -> set[str]:
    """This processor's features among those that code generation uses."""
    from bessemer.backend.features import cpuinfo_names
    from bessemer.backend.target import Target

    return set(cpuinfo_names(Target.native().arch).values()) & host_features()


def test_features_are_those_of_proc_cpuinfo(tmp_path: Path) -> None:
    """Each feature that code generation knows: the C library and Python say the same of it."""
    from bessemer.backend.features import cpuinfo_names
    from bessemer.backend.target import Target

    source = tmp_path / "ask.c"
    names = sorted(cpuinfo_names(Target.native().arch).values())
    source.write_text(
        '#include "internal.h"\nint ask(const char *name);\nint ask(const char *name) {\n'
        "    const char *const one[] = {name, NULL};\n"
        "    return bsm_missing_feature(one) == NULL;\n}\n"
    )
    from bessemer.backend.link import compile_c, link_shared
    from bessemer.native import FOLDER

    target = Target.native()
    flags = [f"-I{FOLDER}", "-fvisibility=default"]
    compile_c(source, tmp_path / "ask.o", target, flags)
    compile_c(FOLDER / "cpu.c", tmp_path / "cpu.o", target, flags)
    link_shared([tmp_path / "ask.o", tmp_path / "cpu.o"], tmp_path / "ask.so", target)
    ask = ctypes.CDLL(str(tmp_path / "ask.so")).ask
    assert {n for n in names if ask(n.encode())} == known_here()
    assert not ask(b"warp9")


def test_every_status_has_words(api: Api) -> None:
    words = [api.status_text(status) for status in range(13)]
    assert len(set(words)) == 13
    assert api.status_text(13) == api.status_text(-1) == b"unknown status"


def test_two_libraries_and_each_other_s_handles(api: Api, folder: Path, tmp_path: Path) -> None:
    """Two models in one process, one with a prefix; a handle of one is refused by the other."""
    other = write_c_toy(tmp_path / "toy", prefix="mine_", vocab=VOCAB)
    mine = Api(other / "model.so", "mine_")
    first, second = CModel(api, folder), CModel(mine, other)
    works(first)
    works(second)
    error, handle = c_api.Error(), ctypes.c_void_p()
    assert mine.session_create(first.handle, ctypes.byref(handle), error) == c_api.ARGUMENT
    assert error.message == b"the model was opened by another library"
    session = first.session()
    assert mine.rewind(session.handle, 0, error) == c_api.ARGUMENT
    assert error.message == b"the session is one of another model"
    session.prefill([1, 2, 3])
    assert mine.threads(first.handle) == mine.position(session.handle) == 0
    assert not mine.tokens(session.handle)
    assert not mine.logits(session.handle)
    mine.cancel(session.handle)
    mine.session_destroy(session.handle)
    mine.close(first.handle)
    np.testing.assert_array_equal(session.decode(4), expected([1, 2, 3, 4]))
    assert api.threads(first.handle) > 0
    works(first)


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_no_memory(tmp_path: Path) -> None:
    """In a process that may have little: an error that says how much, and nothing is left open."""
    folder = write_c_toy(tmp_path / "toy", capacity=40_000_000)
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from tests.embedding.c_api import Api, CError, CModel\n"
        "folder = Path(sys.argv[1])\n"
        "model = CModel(Api(folder / 'model.so'), folder, threads=1)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)\n"
        "for _ in range(3):\n"
        "    try:\n"
        "        model.session()\n"
        "    except CError as error:\n"
        "        print(error.status, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout
    need = read_manifest(folder).state.nbytes
    assert all(
        f"{c_api.MEMORY} no memory for a session: its cache takes {need}" in x for x in lines
    )
    assert all(x.endswith("compile the model with a smaller --context") for x in lines)


@pytest.mark.skipif(sys.platform != "linux", reason="limits data as Linux does")
def test_no_memory_for_weights_of_its_own(tmp_path: Path) -> None:
    """That mapped weights need less is said, and true: a file is no data of the process."""
    numbers = 4 << 20
    folder = write_c_toy(tmp_path / "toy", vocab=numbers, bias=np.zeros(numbers, np.float32))
    script = (
        "import os, re, resource, sys\n"
        "from pathlib import Path\n"
        "from tests.embedding.c_api import AUTO, HUGE, MAP, Api, CError, CModel\n"
        "folder = Path(sys.argv[1])\n"
        "api = Api(folder / 'model.so')\n"
        "os.environ['BESSEMER_WEIGHTS'] = 'huge'\n"
        "CModel(api, folder, threads=1).close()\n"
        "used = re.search(r'VmData:\\s+(\\d+)', open('/proc/self/status').read())\n"
        "limit = int(used[1]) * 1024 + (8 << 20)\n"
        "for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS):\n"
        "    for mode in (AUTO, HUGE, MAP):\n"
        "        resource.setrlimit(kind, (limit, resource.RLIM_INFINITY))\n"
        "        try:\n"
        "            CModel(api, folder, threads=1, weights_mode=mode)\n"
        "            print('opened')\n"
        "        except CError as error:\n"
        "            print(error.status, error)\n"
        "    resource.setrlimit(kind, (resource.RLIM_INFINITY,) * 2)\n"
        "    used = re.search(r'VmSize:\\s+(\\d+)', open('/proc/self/status').read())\n"
        "    limit = int(used[1]) * 1024 + (8 << 20)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True
    )
    none = f"{c_api.MEMORY} no memory for {4 * numbers} bytes of weights"
    less = f"{none}; mapped from their file they need less"
    *data, auto, huge, mapped = done.stdout.splitlines()
    assert data == [
        f"{less}: set BESSEMER_WEIGHTS=map",
        f"{less}: open with BSM_WEIGHTS_MAP",
        "opened",
    ]
    assert (auto, huge) == (none, none)  # of a limited address space a file takes as much
    assert "can't be mapped" in mapped
