"""The Python scripts in examples/, run for real on a tiny random model with a tokenizer."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.runtime.tiny_tokenizers import byte_level
from tests.tiny_models import tiny

FOLDER = Path(__file__).parents[2] / "examples"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with a byte-level tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("source") / "llama"
    tokenizer = byte_level()
    _, model = tiny("llama", num_hidden_layers=2, vocab_size=tokenizer.get_vocab_size())
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def test_every_example_is_run_here() -> None:
    assert {p.stem for p in FOLDER.glob("*.py")} == {
        "stream_text",
        "session_api",
        "compile_own_module",
    }


def test_stream_text(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("stream_text").main(str(checkpoint), "hello world")
    out = capsys.readouterr().out
    assert out.startswith("hello world")
    assert "sampled twice with one seed, equal: True" in out
    first, second = re.findall(r"(\d+) of (\d+) prompt tokens were new", out)
    assert first[0] == first[1]
    assert int(second[0]) < int(second[1])


def test_session_api(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("session_api").main(str(checkpoint))
    out = capsys.readouterr().out
    assert "rewound and decoded again, equal: True" in out
    assert len(re.findall(r"goes on '", out)) == 2
    assert -20 < float(re.findall(r"log-probability of the prompt: (\S+)", out)[0]) < 0


def test_compile_own_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("compile_own_module").main(tmp_path / "tiny-gpt")
    out = capsys.readouterr().out
    assert "TinyGPT: context 64, vocabulary 61" in out
    assert "below 1e-5: True" in out
    assert (tmp_path / "tiny-gpt" / "manifest.json").exists()
