"""BEHAVIOURS, Text and Sampling, through the whole product: checkpoint, compiler, command line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bessemer.cli import main
from bessemer.errors import GenerationError
from bessemer.runtime.model import Model
from bessemer.runtime.streaming import TextStreamer
from tests.behaviours.models import (
    BARRED_EOS,
    BOS,
    EOS,
    TEXT_VOCAB,
    bessemer,
    build,
    save_folder,
    scripted,
    text_model,
)
from tests.runtime import tiny_tokenizers

EMOJI = "😀".encode()
COMBINED = "e\u0301x".encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Says after `f` an emoji byte by byte, after `c` letters that combine, after `2` the second
    end-of-text token, after `u` what the tokenizer doesn't have, after `g` "o w", after `n`
    NaN, and else `a`.
    """
    backend = tiny_tokenizers.byte_level()
    barred, size = backend.token_to_id(BARRED_EOS), backend.get_vocab_size()
    assert size < TEXT_VOCAB - 4
    then: dict[int, list[int]] = {
        ord("2"): [barred],
        # The padding of the table has the highest logits.
        ord("u"): [TEXT_VOCAB - 1, size, ord("v"), ord("w")],
        ord("v"): [barred],
        ord("A"): [0xA1],
        0xA1: [barred],
    }
    for start, text in (("f", EMOJI), ("c", COMBINED), ("g", b"o w")):
        chain = [ord(start), *text, barred]
        then |= {said: [following] for said, following in pairwise(chain)}
    made = scripted(text_model(), b"a", then)
    made.model.embed_tokens.weight[ord("n")] = np.nan
    folder = save_folder(
        tmp_path_factory.mktemp("text") / "checkpoint",
        made,
        tokenizer={"add_bos_token": True},
        generation={"eos_token_id": [backend.token_to_id(EOS), barred]},
    )
    return build(folder, context=128)


def pieces(model: Model, prompt: str, **options: object) -> tuple[list[str], str]:
    stream = model.stream(prompt, **options)
    return list(stream), stream.result.finish_reason


def test_t01_t02_characters_come_whole(model: Model) -> None:
    assert pieces(model, "f") == (["😀"], "stop")
    assert pieces(model, "f", max_tokens=3) == (["\ufffd"], "length")
    assert pieces(model, "c") == (["e", "\u0301", "x"], "stop")


def test_t03_a_lone_byte(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    assert pieces(model, "A") == (["\ufffd"], "stop")
    assert main(["run", str(model.path), "-p", "A", "--raw", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "\ufffd"


def test_t05_an_end_with_full_width_bars(model: Model) -> None:
    """No exception, and not shown: neither by the streamer nor in an answer nor in a decode."""
    barred = model.tokenizer.token_id(BARRED_EOS)
    assert barred is not None
    streamer = TextStreamer(model.tokenizer)
    assert streamer.push(barred) + streamer.push(ord("x")) + streamer.finish() == "x"
    stream = model.stream("2")
    assert (list(stream), stream.result.tokens) == ([], (barred,))
    assert model.tokenizer.decode([ord("x"), barred]) == "x"


def test_t06_exactly_one_bos(model: Model) -> None:
    """The template starts with BOS and the tokenizer adds one; a plain text has one too."""
    bos = model.tokenizer.token_id(BOS)
    chat = model.encode_chat([{"role": "user", "content": "x"}])
    plain = model.tokenizer.encode("y")
    for ids in (chat, plain):
        assert ids[0] == bos
        assert ids.count(bos) == 1
    stream = model.stream("y", max_tokens=1)
    assert list(stream) == ["a"]
    assert stream.result.prompt_tokens == len(plain) == 2


def test_t08_every_end_of_text_token_ends(model: Model) -> None:
    """generation_config has two, the tokenizer one; the model says the other one."""
    ends = {model.tokenizer.token_id(EOS), model.tokenizer.token_id(BARRED_EOS)}
    assert model.tokenizer.eos_ids == ends
    assert pieces(model, "2", max_tokens=9) == ([], "stop")
    assert pieces(model, "y", max_tokens=2) == (["a", "a"], "length")


def test_t09_stop_strings(model: Model) -> None:
    assert "".join(pieces(model, "g")[0]) == "o w"
    assert pieces(model, "g", stop=["o w", "zz9zzz"]) == ([], "stop")
    shown, reason = pieces(model, "g", stop=["o wx", "zz9zzz"])
    assert ("".join(shown), reason) == ("o w", "stop")


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.01])
def test_t15_ids_past_the_tokenizer(model: Model, temperature: float) -> None:
    assert model.vocab_size == TEXT_VOCAB > model.tokenizer.vocab_size
    logits = model.session().prefill([ord("u")])
    assert int(logits.argmax()) == TEXT_VOCAB - 1
    for seed in range(5):
        options = {"temperature": temperature, "seed": seed}
        assert pieces(model, "u", **options) == (["v"], "stop")


def test_n02_nan_is_no_text(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GenerationError, match="NaN"):
        model.generate("n")
    assert main(["run", str(model.path), "-p", "n", "--raw"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "bessemer: error: the model computed NaN" in shown.err
    assert model.generate("y", max_tokens=2) == "aa"


def test_s01_s02_s04_sampling(model: Model) -> None:
    """Ties go to the lowest id; a temperature near 0 is the argmax; no filter gives many ids."""
    flat = {"logit_bias": {ord("b"): 3.0}, "max_tokens": 1}
    logits = model.session().prefill(model.tokenizer.encode("y"))
    assert logits[ord("a")] > logits[ord("b")]
    level = {ord("b"): float(logits[ord("a")] - logits[ord("b")])}
    for _ in range(3):
        assert model.generate("y", max_tokens=1, logit_bias=level) == "a"
    assert model.generate("y", temperature=1e-6, seed=3, max_tokens=3) == "aaa"
    several = {model.generate("y", temperature=50.0, top_k=0, seed=s, **flat) for s in range(40)}
    assert len(several) > 10
    few = {model.generate("y", temperature=50.0, top_k=2, seed=s, **flat) for s in range(40)}
    assert few == {"a", "b"}
    huge = model.generate("y", temperature=50.0, top_k=10**9, seed=1, **flat)
    assert huge == model.generate("y", temperature=50.0, top_k=0, seed=1, **flat)
    assert model.generate("y", temperature=1.0, top_p=0.0, seed=1, max_tokens=2) == "aa"


def test_k03_k07_on_the_command_line(model: Model, tmp_path: Path) -> None:
    """The counts and the limit are named, nothing is cut, and the exit code is 1."""
    (tmp_path / "long.txt").write_text("y" * 200)
    done = bessemer("run", model.path, "--raw", "-f", tmp_path / "long.txt")
    assert (done.returncode, done.stdout) == (1, "")
    assert "201 tokens" in done.stderr
    assert "128" in done.stderr
    (tmp_path / "fits.txt").write_text("y" * 121)
    done = bessemer("run", model.path, "--raw", "-f", tmp_path / "fits.txt", "--json")
    report = json.loads(done.stdout)
    assert (report["finish_reason"], report["tokens"], report["prompt_tokens"]) == (
        "length",
        7,
        122,
    )
