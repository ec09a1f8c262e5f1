"""The comparison's own logic, with engines that answer by the book."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peers")]

import compare  # noqa: E402
import engines  # noqa: E402
import gguf_writer  # noqa: E402
from tables import markdown  # noqa: E402

from bessemer.artifact.work import GroupWork, Work  # noqa: E402
from bessemer.bench.machine import Peaks  # noqa: E402
from bessemer.bench.protocol import WorkerError  # noqa: E402
from bessemer.errors import UsageError  # noqa: E402

LINEAR = {"flops": 100, "weight_bytes": 50}
WORK = Work(
    {
        "forward_prefill": (GroupWork("p", "linear", 1, "T", **LINEAR),),
        "forward_decode": (GroupWork("d", "linear", 1, "1", **LINEAR),),
    }
)


class FakeWorker:
    """Stands for a process: seconds from a function, and a diary of who was asked when."""

    pid = 1
    diary: list[tuple[str, str]] = []  # noqa: RUF012 - shared by all on purpose

    def __init__(self, name: str, seconds: Callable[[], float]) -> None:
        self.name, self.seconds, self.closed = name, seconds, False

    def ask(self, op: str, **arguments: Any) -> dict[str, float]:
        self.diary.append((self.name, op))
        return {"seconds": self.seconds()}

    def close(self) -> None:
        self.closed = True


class FakeProbes:
    """Peaks that get better from measurement to measurement."""

    turns = 0

    def measure(self, threads: int) -> Peaks:
        self.turns += 1
        return Peaks(threads, 1000.0 * self.turns, 500.0)


def running(name: str, seconds: Callable[[], float]) -> engines.Running:
    return engines.Running(name, f"{name} 1", FakeWorker(name, seconds), 2)  # type: ignore[arg-type]


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> compare.Round:
    monkeypatch.setattr(compare, "PAUSE", 0)
    FakeWorker.diary.clear()
    wanted = compare.parser().parse_args(["m", "--prompt", "10", "--generate", "2", "--depth", "4"])
    steps = iter([9.0, 1.0, 2.0, 3.0] * 100)
    engines_ = [
        running("Bessemer", lambda: 0.5),
        running("llama.cpp", lambda: next(steps)),
        running("broken", _broken),
    ]
    return compare.Round("f32", 2, compare.all_trials(wanted), engines_, {}, WORK, 512)


def _broken() -> float:
    raise WorkerError("it fell over\nand broke")


def test_turns_interleave_and_the_warm_up_does_not_count(one: compare.Round) -> None:
    for turn in range(4):
        one.measure(turn, FakeProbes())  # type: ignore[arg-type]
    assert {name: len(s) for name, s in one.seconds.items()} == {
        (engine, trial): 3 for engine in ("Bessemer", "llama.cpp") for trial in ("pp10", "tg2@d4")
    }
    prompts = [name for name, op in FakeWorker.diary if op == "prefill"]
    assert prompts[:3] == ["Bessemer", "llama.cpp", "broken"]
    assert prompts[3:5] == ["llama.cpp", "Bessemer"]  # the next turn begins with another one
    assert one.absent == {"broken": "and broke"}


def test_results_and_table(one: compare.Round) -> None:
    probes = FakeProbes()
    for turn in range(4):
        one.measure(turn, probes)  # type: ignore[arg-type]
    results = {(r["engine"], r["test"]): r for r in one.results()}
    ours = results["Bessemer", "pp10"]
    assert ours["tokens_per_second"] == 20.0
    assert ours["precision"] == "f32"
    # Each with the better peaks beside it.
    beside = [p.flops for p in one.peaks["Bessemer", "pp10"]]
    assert beside == sorted(beside)
    assert len(set(beside)) == 3
    assert ours["fma_share"] == pytest.approx(10 * 100 / 0.5 / beside[1])
    assert one.best is not None
    assert one.best.flops == 1000.0 * probes.turns
    assert ours["intensity"] == pytest.approx(10 * 100 / 50)
    assert results["Bessemer", "tg2@d4"]["bandwidth_share"] == pytest.approx(100 / 0.5 / 500)
    found = {
        "model": "a model",
        "machine": {"cpu": "A CPU", "cores": 2},
        "rounds": [
            {
                "precision": "f32", "threads": 2, "flops_per_second": 4e9,
                "read_bytes_per_second": 5e9, "load_average": [0.5, 3.25],
                "absent": one.absent,
                "engines": [
                    {"name": e.name, "version": e.version, "memory": {"rss_peak": 7 << 20}}
                    for e in one.running
                ],
            }
        ],
        "results": list(results.values()),
    }  # fmt: skip
    json.dumps(found)
    text = markdown(found)
    assert "| Bessemer | 20.0 (20.0..20.0) | 4.0 (4.0..4.0) | 7 |" in text
    theirs = results["llama.cpp", "pp10"]["tokens_per_second"]
    assert f"| {20 / theirs:.2f}x |" in text
    assert "Highest load average before a turn: 3.2" in text
    assert "Left out: broken (and broke)." in text


def test_python_for_one_engine_or_all() -> None:
    table = compare.python_table(["/all/python", "openvino=/ov/python"])
    assert table == {"": "/all/python", "openvino": "/ov/python"}
    assert compare.python_table([]) == {"": sys.executable}


@pytest.mark.parametrize("words", [["--prompt", "0", "--generate", "0"], ["--depth", "0"]])
def test_what_not_every_engine_can_do_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        compare.all_trials(compare.parser().parse_args(["m", *words]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engines", "llamacpp,nobody"], "unknown: llamacpp, nobody; known: "),
        (["--engines", ","], "names are needed"),
        (["--precision", "f99"], "unknown: f99; known: f32"),
        (["--prompt", ","], "numbers by comma are needed"),
        (["--peer-python", "openvino=/no/python"], "/no/python is no program that can be run"),
    ],
)
def test_names_that_nobody_has_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.parser().parse_args(["m", *words])
    assert message in capsys.readouterr().err
    names = ",".join(engine.name for engine in engines.ENGINES)
    assert len(compare.parser().parse_args(["m", "--engines", names]).engines) > 1


def test_what_users_get_wrong_is_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert compare.main([str(tmp_path / "nosuch"), "--work", str(tmp_path / "work")]) == 1
    assert "compare: error: " in capsys.readouterr().err
    assert compare.main(["m", "--depth", "0", "--work", str(tmp_path / "work")]) == 2
    assert "every --depth at least 1" in capsys.readouterr().err


def test_every_engine_has_its_script() -> None:
    for engine in engines.ENGINES:
        text = (engines.PEERS / engine.script).read_text(encoding="utf-8")
        if "(WholeAnswers)" in text:
            text += (engines.PEERS / "common.py").read_text(encoding="utf-8")
        for command in ("version", "convert", "load", "prefill", "decode"):
            assert f"def {command}(" in text
        assert set(engine.precisions) <= set(engines.PRECISIONS)


def test_an_engine_that_is_not_installed_is_told(tmp_path: Path) -> None:
    source = engines.Source("m", tmp_path, tmp_path)
    missing = engines.Engine("nobody", "nobody_peer.py", ("f32",))
    said: list[str] = []
    found, absent = engines.start_all(
        source, "f32", 1, (missing,), lambda engine: sys.executable, said.append
    )
    assert found == []
    assert list(absent) == ["nobody"]
    assert "nobody_peer.py" in absent["nobody"]


def test_without_matplotlib_the_last_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare, "compare", lambda arguments, keep: {"results": [1]})
    monkeypatch.setattr(compare, "markdown", lambda found: "the table\n")
    failed = subprocess.CompletedProcess([], 1)
    monkeypatch.setattr(compare.subprocess, "run", lambda *words, **how: failed)
    assert compare.main(["model", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == "the table\n"
    last = shown.err.splitlines()[-1]
    assert "no speed.png and no roofline.png" in last
    assert f"plots.py {tmp_path / 'results.json'}" in last


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_weights_survive_the_way_to_gguf_and_back(kind: str, tmp_path: Path) -> None:
    """To the file that llama.cpp gets, and from a GGUF to the folder that the others get."""
    import numpy as np

    from bessemer.importer.checkpoint import open_checkpoint
    from tests.tiny_models import tiny

    source = tmp_path / "source"
    _, model = tiny(kind, rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    model.save_pretrained(source)
    path = tmp_path / "model.gguf"
    gguf_writer.write_gguf(source, "f32", path)
    folder = engines.huggingface_folder(str(path), tmp_path / "work")
    assert engines.huggingface_folder(str(folder), tmp_path / "work") == folder
    with open_checkpoint(source) as first, open_checkpoint(folder) as last:
        assert first.names() == last.names()
        for name in first.names():
            np.testing.assert_array_equal(first.read(name), last.read(name))
        for key in ("num_key_value_heads", "head_dim", "vocab_size", "intermediate_size"):
            assert first.config.get(key, 16) == last.config.get(key, 16)
        assert last.config["rope_parameters"]["rope_theta"] == 5e4


def test_an_architecture_without_a_way_to_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(ValueError, match="gemma3"):
        gguf_writer.write_gguf(tmp_path, "f16", tmp_path / "x.gguf")
