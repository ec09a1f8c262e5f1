"""DeepSeek V4 as a user meets it: a folder with a tokenizer, the command line, the real model's
compression rates and window, more rows than the index picks, matrices that threads share by depth.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.artifact.work import read_work
from bessemer.cli import main
from bessemer.compile_options import CompileOptions
from bessemer.compiler import compile_model
from bessemer.errors import CheckpointError
from bessemer.importer.reference import LowestFirst
from bessemer.runtime.model import Model
from tests.e2e.compiled import F32_ERROR, reference
from tests.runtime import tiny_tokenizers
from tests.tiny_models import V4_KINDS, tiny

PICKED, RATE = 64, 4
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "layer_types": V4_KINDS[1:],
    "mlp_layer_types": ["hash_moe", "moe"],
    "compress_rates": {V4_KINDS[1]: RATE, V4_KINDS[2]: 128},
    "sliding_window": 128,
    "index_topk": PICKED,
    "hc_mult": 4,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("deepseek_v4", **SIZES)[1]


@pytest.fixture(scope="module")
def compiled(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved with a tokenizer, and compiled by the command line."""
    source = tmp_path_factory.mktemp("v4")
    model.save_pretrained(source)
    tiny_tokenizers.write(source, tiny_tokenizers.byte_level())
    folder = source / "out"
    options = ["--weights", "f32", "--kv", "f32", "--context", "1024"]
    assert main(["compile", str(source), "-o", str(folder), *options]) == 0
    return folder


def test_beyond_what_the_index_picks(model: Any, compiled: Path) -> None:
    """Over blocks of 4 and of 128, in pieces and steps, for every number of threads."""
    count, steps = 648, 12
    assert count > 2 * PICKED * RATE
    ids = np.random.default_rng(3).integers(0, 256, count).tolist()
    with LowestFirst():
        want = reference(model, ids)
    kinds = {group.kind for group in read_work(compiled).entries["forward_decode"]}
    assert {"linear_parts", "linear_combine"} <= kinds
    found = []
    for threads in (1, 2, 3):
        session = Model.load(compiled, threads=threads).session()
        pieces = [ids[:257], ids[257:260], ids[260 : count - steps]]
        rows = [session.prefill(piece, all_logits=True) for piece in pieces]
        rows += [session.decode(i)[None] for i in ids[count - steps :]]
        found.append(np.concatenate(rows))
    errors = np.linalg.norm(found[0] - want, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(errors) < F32_ERROR / 10
    # Scores that differ by rounding alone may pick another row of the 64.
    assert np.count_nonzero(errors > F32_ERROR) <= 2
    for other in found[1:]:
        assert np.array_equal(found[0], other)


def test_the_command_line(
    compiled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, asked = tmp_path / "log.jsonl", [str(compiled), "-p", "ab", "--raw"]
    assert main(["run", *asked, "--dump-tokens", "--json"]) == 0
    assert [t["id"] for t in json.loads(capsys.readouterr().out)["tokens"]] == [97, 98]
    dumped = ["--max-tokens", "3", "--dump-logprobs", str(file), "--top-logprobs", "2", "--json"]
    assert main(["run", *asked, "--temperature", "0", *dumped]) == 0
    answer = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert answer["prompt_tokens"] == 2
    assert len(lines) == answer["tokens"] == 3
    assert [line["id"] for line in lines] == [line["top"][0]["id"] for line in lines]
    session = Model.load(compiled).session()
    assert lines[0]["id"] == int(np.argmax(session.prefill([97, 98])))
    assert main(["run", str(compiled), "--diagnose", "first-token", "--json"]) == 0
    diagnosed = json.loads(capsys.readouterr().out)
    assert diagnosed["agree"]
    shown = {(s["layer"], s["stage"]) for s in diagnosed["stages"]}
    assert {(0, "attention"), (1, "attention"), (1, "mix streams"), (0, "experts down")} <= shown


def test_routers_that_are_no_numbers(tmp_path: Path) -> None:
    """Without an error the expert would never be chosen, and nobody would know."""
    _, model = tiny("mixtral", num_hidden_layers=1)
    name = "model.layers.0.mlp.gate.weight"
    model.state_dict()[name].reshape(-1)[5] = torch.nan
    with pytest.raises(CheckpointError, match=f"{name} holds NaN \\(1 of"):
        compile_model(model, CompileOptions(weights="q8_0", context=64), tmp_path / "m")
