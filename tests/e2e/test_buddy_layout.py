"""`--layout buddy`: upstream MLIR that the documented recipe lowers to the same logits."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.api import compile_to
from bessemer.backend.tools import llvm_tool, mlir_tool
from bessemer.buddy_layout import file_names
from bessemer.cli import main
from bessemer.compile_options import CompileOptions
from bessemer.errors import ArtifactError, UnsupportedError, UsageError
from tests.e2e.compiled import tiny_pair, token_ids
from tests.tiny_models import LONG_ROPE, tiny

RECIPE = Path(__file__).parents[2] / "docs" / "buddy-layout.md"
CONTEXT = 40
# Parameters and caches are rounded to f16 on one side: eleven bits, over a few layers.
F16_ERROR = 5e-3
F32_ERROR = 1e-5
NUMBERS: dict[str, type] = {"f16": np.float16, "f32": np.float32}
IDS = token_ids(15, seed=5)
PREFILL = 11


def memref(rank: int) -> Any:
    """MLIR's descriptor of this rank."""
    many = ctypes.c_int64 * rank
    fields = [
        ("allocated", ctypes.c_void_p),
        ("aligned", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("sizes", many),
        ("strides", many),
    ]
    return type(f"Memref{rank}", (ctypes.Structure,), {"_fields_": fields})


DESCRIPTORS = {rank: memref(rank) for rank in (1, 2, 3, 4)}


def described(array: np.ndarray) -> ctypes.Structure:
    kind, at = DESCRIPTORS[array.ndim], array.ctypes.data
    steps = [s // array.itemsize for s in array.strides]
    many = ctypes.c_int64 * array.ndim
    return kind(at, at, 0, many(*array.shape), many(*steps))


def floats(found: Any, rank: int, dtype: type) -> np.ndarray:
    """A copy of what a descriptor describes."""
    shape = tuple(found.sizes)
    count = int(np.prod(shape))
    assert found.offset == 0
    bytes_ = ctypes.string_at(found.aligned, count * np.dtype(dtype).itemsize)
    return np.frombuffer(bytes_, dtype).reshape(shape)


class Old:
    """The two entry points, driven as the walkthrough's program does."""

    def __init__(self, folder: Path, precision: str, caches: int) -> None:
        self.library = ctypes.CDLL(str(folder / "model.so"))
        self.flat = np.fromfile(folder / f"arg0-{precision}.data", NUMBERS[precision])
        names = [(f"cache{i}", DESCRIPTORS[4]) for i in range(caches)]
        fields = [*names, ("logits", DESCRIPTORS[3])]
        self.returns = type("Returns", (ctypes.Structure,), {"_fields_": fields})
        self.caches: list[Any] = []
        self.position = 0

    def prefill(self, ids: list[int]) -> np.ndarray:
        found = self.returns()
        tokens = np.array([ids], np.int64)
        self._call("prefill", found, [tokens])
        self.caches = [getattr(found, name) for name, _ in self.returns._fields_[:-1]]
        self.position = len(ids)
        return floats(found.logits, 3, np.float32)[0]

    def decode(self, token: int) -> np.ndarray:
        found = self.returns()
        tokens, position = np.array([[token]], np.int64), np.array([self.position], np.int64)
        self._call("decode", found, [tokens, position], self.caches)
        for name, before in zip(self.returns._fields_[:-1], self.caches, strict=True):
            assert getattr(found, name[0]).aligned == before.aligned
        self.position += 1
        return floats(found.logits, 3, np.float32)[0]

    def _call(self, phase: str, found: Any, arrays: list[np.ndarray], more: Any = ()) -> None:
        function = self.library[f"_mlir_ciface_forward_{phase}"]
        function.restype = None
        held = [found, described(self.flat), *map(described, arrays), *more]
        function(*map(ctypes.byref, held))


def shell(folder: Path, precision: str) -> None:
    """Run the code blocks of the recipe, as they stand, on the files in `folder`."""
    tools = [mlir_tool("mlir-opt"), mlir_tool("mlir-translate"), llvm_tool("llc")]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if None in tools or compiler is None or shutil.which("bash") is None:
        pytest.skip("the recipe needs mlir-opt, mlir-translate, llc, bash and a C compiler")
    text = RECIPE.read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text.split("## The recipe")[1], re.DOTALL)
    script = "set -e\n" + "".join(blocks).replace("-f16.mlir", f"-{precision}.mlir")
    folders = ":".join(dict.fromkeys(str(Path(str(tool)).parent) for tool in tools))
    path = {"PATH": f"{folders}:/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


@cache
def reference(model_type: str) -> np.ndarray:
    _, model = tiny_pair(model_type)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float().numpy()


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# model, precision of parameters and caches, bound of the logits' error: soft caps, windows and a
# tied head; experts, q and k norms.
MODELS = [("gemma2", "f16", F16_ERROR), ("qwen3_moe", "f32", F32_ERROR)]
LAYERS = 3


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a model, made when it is first asked for."""

    @cache
    def make(model_type: str, precision: str) -> Path:
        folder = tmp_path_factory.mktemp("buddy") / "old"
        folder.mkdir()
        for name in file_names(precision):  # of an earlier run
            (folder / name).write_text("stale")
        options = CompileOptions(precision, precision, CONTEXT, layout="buddy")
        return compile_to(tiny_pair(model_type)[1], options, folder)

    return make


@pytest.mark.parametrize(("model_type", "precision", "bound"), MODELS)
def test_recipe(
    model_type: str,
    precision: str,
    bound: float,
    written: Callable[[str, str], Path],
    tmp_path: Path,
) -> None:
    """Prefill of a part and decode of the rest give PyTorch's logits, and caches that hold them."""
    folder = tmp_path / "old"
    shutil.copytree(written(model_type, precision), folder)
    assert sorted(p.name for p in folder.iterdir()) == sorted(file_names(precision))
    shell(folder, precision)
    old = Old(folder, precision, 2 * LAYERS)
    got = [old.prefill(IDS[:PREFILL]), *(old.decode(token) for token in IDS[PREFILL:])]
    assert error(np.concatenate(got), reference(model_type)) < bound
    keys = floats(old.caches[0], 4, NUMBERS[precision])
    assert keys.shape[2] == CONTEXT
    assert keys[:, :, : len(IDS)].any(axis=(1, 3)).all()
    assert not keys[:, :, len(IDS) :].any()
    # Prefill starts again, whatever was before.
    assert error(old.prefill(IDS[:3]), reference(model_type)[:3]) < bound


def test_main_graph_and_file_agree(written: Callable[[str, str], Path]) -> None:
    """The text and the index have the same offsets; the numbers there are the checkpoint's."""
    folder = written("qwen3_moe", "f32")
    index = json.loads((folder / "arg0-f32.json").read_text())
    flat = np.fromfile(folder / "arg0-f32.data", np.float32)
    places = {p["name"]: (p["offset"], p["shape"]) for p in index["parameters"]}
    assert flat.size == index["elements"] == sum(int(np.prod(s)) for _, s in places.values())
    name = "model.layers.1.self_attn.o_proj.weight"
    offset, shape = places[name]
    stored = flat[offset : offset + int(np.prod(shape))].reshape(shape)
    np.testing.assert_array_equal(stored, tiny_pair("qwen3_moe")[1].get_parameter(name).numpy())
    for phase in ("prefill", "decode"):
        text = (folder / f"forward_{phase}-f32.mlir").read_text()
        found = re.findall(r"// (\S+)\n.*?offset: \[(\d+)\], sizes: \[([\d, ]+)\]", text)
        assert len(found) == len(places)
        for name, start, sizes in found:
            assert places[name] == (int(start), [int(n) for n in sizes.split(",")])


def test_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"other files \(notes.txt\)"):
        compile_to(tiny_pair("gemma2")[1], CompileOptions("f32", layout="buddy"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weights": "q8_0"}, "--weights q8_0 has to be one of f32, f16, bf16"),
        ({"prefix": "a_"}, "leave out --prefix"),
        ({"cpu": "baseline"}, "leave out --cpu"),
    ],
)
def test_options_without_a_meaning(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    _, model = tiny_pair("gemma2")
    with pytest.raises(UsageError, match=words):
        compile_to(model, CompileOptions(**options, layout="buddy"), tmp_path / "old")
    assert not (tmp_path / "old").exists()


def test_models_that_do_not_fit(tmp_path: Path) -> None:
    over = {"num_hidden_layers": 1, "original_max_position_embeddings": 10}
    _, model = tiny("phi3", rope_parameters=LONG_ROPE, **over)
    with pytest.raises(UnsupportedError, match="depend on the length of the whole sequence"):
        compile_to(model, CompileOptions("f32", layout="buddy"), tmp_path / "old")


def test_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["compile", str(tmp_path), "--layout", "buddy"]) == 2
    assert "give the folder for it with -o DIR" in capsys.readouterr().err
    assert main(["compile", str(tmp_path), "--layout", "old", "-o", str(tmp_path / "x")]) == 2
    assert "choose one of artifact, buddy" in capsys.readouterr().err
