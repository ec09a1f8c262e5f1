"""The runner's tokenizer gives the ids and the text of the Python one."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from bessemer.artifact.text.build import build_tokenizer_file, write_tokenizer_file
from bessemer.errors import UnsupportedError
from bessemer.importer.checkpoint import open_checkpoint
from bessemer.runtime.stops import StopMatcher
from bessemer.runtime.streaming import TextStreamer
from bessemer.runtime.tokenizer import Tokenizer
from tests.native.text_library import Buffer, NativeError, NativeTokenizer, Stops, text_library
from tests.native.tokenizer_zoo import ZOO, corpus, wrap
from tests.runtime import tiny_tokenizers

RANDOM_TEXTS = 150
# Far beyond what n squared steps could do within a test's time.
LONG_RUN = 200_000


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, NativeTokenizer]:
    """The real tokenizer of SmolLM2, both ways."""
    folder = tmp_path_factory.mktemp("smollm2")
    open_checkpoint("smollm2").write_tokenizer(folder)
    written = write_tokenizer_file(folder)
    assert not written.note
    return Tokenizer.load(folder), NativeTokenizer(written.content, identity=written.checksum)


def compare(python: Tokenizer, native: NativeTokenizer, texts: list[str]) -> None:
    for text in texts:
        for add_special in (True, False):
            ids = python.encode(text, add_special)
            assert native.encode(text, add_special) == ids, repr(text[:80])
        streamer = TextStreamer(python)
        assert native.stream(ids) == [*map(streamer.push, ids), streamer.finish()], text[:80]


@pytest.mark.parametrize("name", ZOO)
def test_ids_and_text(name: str) -> None:
    python = wrap(ZOO[name]())
    native = NativeTokenizer(build_tokenizer_file(python).content)
    compare(python, native, corpus(RANDOM_TEXTS, 1))


def test_real_tokenizer(smollm2: tuple[Tokenizer, NativeTokenizer]) -> None:
    compare(*smollm2, corpus(600, 2))


@pytest.mark.parametrize(
    "make", [tiny_tokenizers.byte_level, tiny_tokenizers.sentencepiece, tiny_tokenizers.metaspace]
)
def test_tokens_in_any_order(make: Callable[[], object]) -> None:
    """Models give ids that no text has: half characters, unknown ids, special ones."""
    python = tiny_tokenizers.wrap(make())  # type: ignore[arg-type]
    native = NativeTokenizer(build_tokenizer_file(python).content)
    rng = random.Random(3)
    for _ in range(200):
        ids = [rng.randrange(-1, python.vocab_size + 3) for _ in range(rng.randint(1, 12))]
        streamer = TextStreamer(python)
        # Joined: Python's decoder waits one byte longer before it gives up half a surrogate.
        text = "".join([*map(streamer.push, ids), streamer.finish()])
        assert "".join(native.stream(ids)) == text, ids


@pytest.mark.parametrize("unit", ["x", " ", "1", "\n", "\u0301", "ab"])
def test_long_runs(smollm2: tuple[Tokenizer, NativeTokenizer], unit: str) -> None:
    python, native = smollm2
    text = unit * (LONG_RUN // len(unit))
    ids = native.encode(text, False)
    assert "".join(native.stream(ids)) == text
    assert ids == python.encode(text, False)


def test_bos(smollm2: tuple[Tokenizer, NativeTokenizer]) -> None:
    """A text that brings its own BOS gets no second one, whatever the configuration adds."""
    for add_bos in (None, True, False):
        backend = tiny_tokenizers.sentencepiece()
        python = tiny_tokenizers.wrap(backend, bos_token="<s>", add_bos_token=add_bos)
        native = NativeTokenizer(build_tokenizer_file(python).content)
        for text in ("hello", "<s>hello", "<s><s> hello", "", "<s>"):
            assert native.encode(text) == python.encode(text), (add_bos, text)
    for add_bos in (None, True, False):
        backend = tiny_tokenizers.byte_level()
        python = tiny_tokenizers.wrap(backend, bos_token="<|bos|>", add_bos_token=add_bos)
        native = NativeTokenizer(build_tokenizer_file(python).content)
        for text in ("hello", "<|bos|>hello", ""):
            assert native.encode(text) == python.encode(text), (add_bos, text)


def test_text_must_be_utf8(smollm2: tuple[Tokenizer, NativeTokenizer]) -> None:
    for data, place in ((b"ab\xff", 2), (b"\xed\xa0\x80", 0), (b"x\xe4\xbd", 1), (b"\xc0\x80", 0)):
        with pytest.raises(NativeError, match=rf"not UTF-8 \(byte {place}\)"):
            smollm2[1].encode(data)


def test_stop_strings() -> None:
    """The same text is shown and the same place found, however the text is cut."""
    library, rng = text_library(), random.Random(4)
    for _ in range(300):
        stops = ["".join(rng.choices("abé", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        pieces = ["".join(rng.choices("abéx", k=rng.randint(0, 5))) for _ in range(6)]
        matcher, native = StopMatcher(stops), Stops()
        kept = [stop.encode() for stop in stops]
        for stop in kept:
            library.bsm_stops_add(ctypes.byref(native), stop, ctypes.c_size_t(len(stop)))
        for piece in pieces:
            shown, data = Buffer(), piece.encode()
            found = library.bsm_stops_push(
                ctypes.byref(native), data, ctypes.c_size_t(len(data)), ctypes.byref(shown)
            )
            assert (shown.take(), bool(found)) == matcher.push(piece), (stops, pieces)
        rest = Buffer()
        library.bsm_stops_flush(ctypes.byref(native), ctypes.byref(rest))
        assert rest.take() == matcher.flush()
        library.bsm_stops_free(ctypes.byref(native))


def test_special_tokens_by_their_text(smollm2: tuple[Tokenizer, NativeTokenizer]) -> None:
    """A stop string that is one ends an answer at its id."""
    python, native = smollm2
    ids = [i for i in range(python.vocab_size) if python.is_special(i)]
    assert [native.special_id(python.token(i) or "") for i in ids] == ids
    assert native.special_id("hello") == native.special_id("") == -1


def test_unknown_characters_without_a_token() -> None:
    """Python raises an error of the library's; so does the runner, and says which character."""
    backend = ZOO["unigram"]()
    state = json.loads(backend.to_str())
    state["model"]["unk_id"] = None
    python = wrap(type(backend).from_str(json.dumps(state)))
    native = NativeTokenizer(build_tokenizer_file(python).content)
    with pytest.raises(NativeError, match=r"U\+12000"):
        native.encode("\U00012000")


def test_other_kinds_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"BertPreTokenizer.*Leave out --runner"):
        build_tokenizer_file(tiny_tokenizers.wrap(tiny_tokenizers.word_piece()))


def test_damaged_files(tmp_path: Path) -> None:
    written = build_tokenizer_file(tiny_tokenizers.wrap(tiny_tokenizers.byte_level()))
    content = written.content
    cases = {
        "no tokenizer file": b"GGUF" + content[4:],
        "cut off": content[:-8],
        "checksum": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        "version 9": content[:8] + b"\x09" + content[9:],
    }
    for message, changed in cases.items():
        with pytest.raises(NativeError, match=message):
            NativeTokenizer(changed)
    with pytest.raises(NativeError, match="belongs to another model"):
        NativeTokenizer(content, identity=written.checksum ^ 1)
    with pytest.raises(NativeError, match=r"has 265 tokens, and the model 100"):
        NativeTokenizer(content, vocab_size=100)
