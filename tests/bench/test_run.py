"""The bench on a real compiled model: its work table, its profile, its command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bessemer.artifact.reader import open_artifact, read_manifest
from bessemer.artifact.work import OUTSIDE, WORK_FILE, Step, read_work
from bessemer.bench.worker import Bench
from bessemer.cli import main
from bessemer.errors import ArtifactError, UsageError
from bessemer.runtime.engine import Engine
from bessemer.runtime.session import Session
from tests import tiny_models

from .conftest import CHUNK, CONTEXT

LAYERS = 3


def test_work_by_hand(measured: Path) -> None:
    """Against the sizes of the configuration."""
    config = tiny_models.tiny_config("mixtral")
    hidden, heads = config.hidden_size, config.num_attention_heads
    width, kv = config.head_dim, config.num_key_value_heads
    experts, chosen = config.num_local_experts, config.num_experts_per_tok
    qkv = hidden * width * (heads + 2 * kv)
    expert = 3 * hidden * config.intermediate_size
    router = hidden * experts
    head = hidden * config.vocab_size
    # What follows the attention: in the last layer it is computed for the wanted rows alone.
    rest = heads * width * hidden + router + chosen * expert
    work = read_work(measured)
    start = 7
    for entry, one in (("forward_prefill", Step(start, 6, 2)), ("forward_decode", Step(start, 1))):
        n, r = one.rows, one.outputs
        seen = LAYERS * sum(min(e, tiny_models.WINDOW) for e in range(start + 1, start + n + 1))
        keys = 4 * heads * width * seen
        products = LAYERS * qkv * n + rest * ((LAYERS - 1) * n + r) + head * r
        assert work.flops(entry, one) == 2 * products + keys
        reads = min(tiny_models.WINDOW + n - 1, start + n)
        assert work.cache_bytes(entry, one) == LAYERS * reads * kv * 2 * width * 4


def test_weight_bytes_are_those_of_the_file(measured: Path) -> None:
    """With enough rows every expert counts; then all stored weights are read but for the table."""
    manifest = read_manifest(measured)
    work = read_work(measured)
    step = Step(0, CHUNK, CHUNK)
    table = next(w for w in manifest.weights if "embed" in w.name)
    everything = sum(w.nbytes for w in manifest.weights) - table.nbytes
    looked_up = CHUNK * table.shape[1] * 2
    found = work.weight_bytes("forward_prefill", step)
    # Of small tables (rotary frequencies) a group reads all or a part.
    assert everything <= found <= everything + looked_up + 4096
    assert work.weight_bytes("forward_prefill", Step(0, 1)) < found


def test_the_profile_counts_every_call(measured: Path) -> None:
    bench = Bench()
    bench.load(str(measured), [2], profile=True)
    work = read_work(measured)
    layout = work.profile
    assert layout is not None
    answer = bench.decode(tokens=3, depth=4, threads=2)
    tables = [layout.read(words) for words in answer["profile"]]
    for table in tables:
        assert table[OUTSIDE][1] == 3
        # All time is charged: from before the first call to the end of the last.
        assert 0 < sum(ns for ns, _ in table.values()) * 1e-9 <= answer["seconds"]
    for group in work.entries["forward_decode"]:
        counts = [table[layout.work_slot(group.function)][1] for table in tables]
        assert counts[0] == 3 * group.calls
        assert counts[1] in (0, 3 * group.calls)  # one thread, or both
    for group in work.entries["forward_prefill"]:
        assert all(table[layout.work_slot(group.function)] == (0, 0) for table in tables)


def test_measuring_does_not_change_the_answer(measured: Path, plain: Path) -> None:
    logits = []
    for folder in (measured, plain):
        session = Session(Engine.load(open_artifact(folder), 2))
        logits.append(session.prefill(np.arange(20) % 90, all_logits=True))
        logits.append(session.decode(5))
    np.testing.assert_array_equal(logits[0], logits[2])
    np.testing.assert_array_equal(logits[1], logits[3])


def test_a_plain_artifact_has_no_profile(plain: Path) -> None:
    assert read_work(plain).profile is None
    with pytest.raises(UsageError, match="measure itself"):
        Bench().load(str(plain), [1], profile=True)


def test_depth_is_exact_after_longer_and_shorter_runs(plain: Path) -> None:
    bench = Bench()
    assert bench.load(str(plain), [1, 2])["threads"] == [1, 2]
    for depth, tokens in ((20, 10), (4, 2), (0, 3), (40, 1)):
        bench.prefill(tokens, depth, 2)
        bench.decode(tokens, depth, 2)
        assert bench.memory()["held"] == depth + tokens


def test_command_line(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", str(measured), "-p", "3,20", "-n", "2", "-d", "0,9", "-t", "1,2", "-r", "2"]
    assert main([*words, "--profile", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = ["pp3", "pp20", "tg2", "pp3@d9", "pp20@d9", "tg2@d9"]
    assert [(r["test"], r["threads"]) for r in found["results"]] == [
        (name, threads) for name in names for threads in (1, 2)
    ]
    for result in found["results"]:
        assert len(result["samples"]) == 2
        assert result["tokens_per_second"] > 0
        assert result["fma_share"] > 0
    assert [p["threads"] for p in found["machine"]["peaks"]] == [1, 2]
    assert found["memory"]["rss_peak_bytes"] > found["memory"]["weights_bytes"]
    assert found["model"]["context"] == CONTEXT
    assert len(found["profiles"]) == 12
    assert all(p["total_s"] > 0 for p in found["profiles"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", "65", "-n", "0"], "needs a context of 65"),
        (["-p", "x"], "-p x: whole numbers from 0"),
        (["-t", "0"], "-t 0: whole numbers from 1"),
        (["-r", "0"], "-r 0: it must be a whole number"),
        (["--json", "--csv"], "one of --json"),
        (["--profile", "--csv"], "--csv has no place for the groups of --profile"),
    ],
)
def test_wrong_calls(
    plain: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(plain), *words]) == 2
    assert message in capsys.readouterr().err


def test_an_artifact_of_before_is_told_to_be_compiled_again(plain: Path, tmp_path: Path) -> None:
    old = shutil.copytree(plain, tmp_path / "old")
    (old / WORK_FILE).unlink()
    with pytest.raises(ArtifactError, match="compile the model again"):
        read_work(old)
    (old / WORK_FILE).write_text("{}")
    with pytest.raises(ArtifactError, match="damaged"):
        read_work(old)


def test_profile_of_a_plain_artifact_compiles_its_source_again(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["bench", str(plain), "-p", "0", "-n", "2", "-t", "1", "-r", "1", "--profile", "--json"]
    assert main(words) == 0
    (profile,) = json.loads(capsys.readouterr().out)["profiles"]
    assert {g["kind"] for g in profile["groups"]} >= {"linear", "expert_linear"}
