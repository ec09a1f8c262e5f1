"""Tokenizers of every kind that the runner takes, trained here on a small multilingual corpus."""

from __future__ import annotations

import random
import struct
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from bessemer.importer.checkpoint.pretokenizers import PRE_TOKENIZERS
from bessemer.runtime.tokenizer import Tokenizer

MARK = "\u2581"
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]

TEXTS = (
    "",
    "a",
    " ",
    "\n",
    "\r\n",
    "hello world",
    "Hello, World! I'm, you're, they'LL 'S 'ſ don't DON'T can’t",
    "1234567890 12 345 $1,234.56 ½ ² Ⅳ ٣ ३",
    "  leading and trailing   ",
    "a\r\nb\r\n\r\nc\t\td\n\n\n  \n x",
    "你好，世界！这是一个测试。日本語のテキスト、カタカナ 한국어 텍스트",
    "Привет, мир! ΑΒΓ αβγ ς \u0627\u0644\u0639\u0631\u0628 \u0939\u093f\u0928\u094d\u0926\u0940",
    "😀👍🏽👨‍👩‍👧‍👦🏔️🇩🇪",
    "e\u0301 a\u0308\u0304 Å \u212b ﬁ ｆｕｌｌ ①② \u1100\u1161\u11a8 \uac00\u11a8 ß \u0344",
    "def f(x):\n    return x**2  # comment\n\n\n\tif a<=b&&c!=d:",
    "<|im_start|>user\nhi<|im_end|> </s><s><unk> <s>x <b>x<b> zz zzz zz. x <ls> y <rs>  z",
    "\u00a0\u2003\u3000x\u200b\u200d\ufeffy \x00\x01\x7f\x80",
    "http://a.b/c?d=e&f=%20#g -- ... !!! ???",
    f"{MARK}a{MARK} b {MARK}{MARK} <0x41>",
    "\u0301\u0323a" + "\u0301\u0323" * 40,
    *(char * 1500 for char in ("x", " ", "\n", "1", "é", "中", "😀", "\u0301")),
    "ab" * 700,
)
_ALPHABET = (
    "abcdefghij ABC  \n\r\t'.,!-_<>|/=0123456789éüñßçøğ中文字漢日本あカ한국аяЖ😀🎉"
    f"\u0301\u0323\u093fﬁ½²\u00a0\u3000\u2028{MARK}"
)
_RANGES = ((0x20, 0x250), (0x300, 0x3000), (0x3000, 0xD7FF), (0xE000, 0x1FFFF), (0x20000, 0x110000))


def corpus(count: int, seed: int) -> list[str]:
    """The fixed texts and so many random ones: of common characters, and of any."""
    rng = random.Random(seed)
    texts = list(TEXTS)
    for index in range(count):
        size = rng.randint(1, 50)
        if index % 5:
            texts.append("".join(rng.choices(_ALPHABET, k=size)))
        else:
            texts.append("".join(chr(rng.randrange(*rng.choice(_RANGES))) for _ in range(size)))
    return texts


TRAINING = corpus(400, 7)


def byte_level(
    pre: pre_tokenizers.PreTokenizer,
    normalizer: normalizers.Normalizer | None = None,
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    """A BPE over bytes, with added tokens of every kind."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING, trainer)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_tokens(
        [
            AddedToken("    ", normalized=False),
            AddedToken("<b>", normalized=True),
            AddedToken("zz", single_word=True, normalized=False),
            AddedToken("<ls>", lstrip=True),
            AddedToken("<rs>", rstrip=True, normalized=False),
        ]
    )
    return backend


def family(name: str) -> tokenizers.Tokenizer:
    """As the GGUF files of this family have it."""
    rules = PRE_TOKENIZERS[name]
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level(
        pre_tokenizers.Sequence([*splits, last]),
        normalizers.NFC() if rules.nfc else None,
        rules.ignore_merges,
    )


def falcon() -> tokenizers.Tokenizer:
    """Splits after the ByteLevel stage see bytes."""
    steps = [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
    return byte_level(pre_tokenizers.Sequence(steps))


def split_by(behavior: str, invert: bool) -> tokenizers.Tokenizer:
    split = pre_tokenizers.Split(Regex(r"[\s,]"), behavior, invert=invert)
    return byte_level(
        pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    )


def normalised() -> tokenizers.Tokenizer:
    steps = [
        normalizers.Strip(),
        normalizers.Replace(Regex(" {2,}"), " "),
        normalizers.Replace("ab", "Q"),
        normalizers.NFKC(),
    ]
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), normalizers.Sequence(steps))


def sentencepiece_bpe(
    metaspace: str | None = None, prefix: bool = True, fallback: bool = True, fuse: bool = True
) -> tokenizers.Tokenizer:
    """As Llama 2 (`prefix`), Gemma (without), or with a Metaspace pre-tokenizer of this scheme."""
    backend = tokenizers.Tokenizer(
        models.BPE(byte_fallback=fallback, unk_token="<unk>", fuse_unk=fuse)
    )
    replace = normalizers.Replace(" ", MARK)
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metaspace is not None:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=metaspace)
        backend.decoder = decoders.Metaspace(prepend_scheme=metaspace)
    else:
        prepend = normalizers.Sequence([normalizers.Prepend(MARK), replace])
        backend.normalizer = prepend if prefix else replace
        backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=SPECIAL + BYTE_TOKENS * fallback,
        show_progress=False,
        limit_alphabet=120,
    )
    backend.train_from_iterator([text[:200] for text in TRAINING], trainer)
    # Found in the normalised text, by its own normal form.
    backend.add_tokens([AddedToken("<b>", normalized=True)])
    _surround(backend, "<s> $A")
    return backend


def _surround(backend: tokenizers.Tokenizer, pattern: str) -> None:
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=ids)


def unigram(
    normalizer: normalizers.Normalizer | None = None, fallback: bool = False, split: bool = True
) -> tokenizers.Tokenizer:
    rng = random.Random(1)
    chars = sorted({char for text in TRAINING for char in text} - {" ", MARK})
    rng.shuffle(chars)
    words = set()
    for text in TRAINING:
        marked = MARK + text.replace(" ", MARK)
        starts = [rng.randrange(len(marked)) for _ in range(4)]
        words.update(marked[at : at + rng.randint(2, 6)] for at in starts)
    vocab = [(token, 0.0) for token in SPECIAL]
    vocab += [(token, -8.0) for token in BYTE_TOKENS * fallback]
    vocab += [(MARK, -3.0), *((char, -rng.uniform(3, 9)) for char in chars[:140])]
    vocab += [(w, -rng.uniform(4, 14)) for w in sorted(words) if len(w) > 1][:1200]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=fallback))
    if normalizer is not None:
        backend.normalizer = normalizer
    scheme = "first" if fallback else "always"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if fallback:
        steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(SPECIAL)
    _surround(backend, "$A </s>")
    return backend


def charsmap(pairs: Mapping[str, str]) -> bytes:
    """A map of characters as SentencePiece writes it: a double array of the keys (Darts-clone), its
    units placed at the first free place, and the texts.
    """
    texts = bytearray()
    trie: dict[int, Any] = {}
    for key, value in pairs.items():
        node = trie
        for byte in key.encode():
            node = node.setdefault(byte, {})
        node[-1] = len(texts)
        texts += value.encode() + b"\0"
    units: dict[int, int] = {0: 0}

    def place(at: int, node: dict) -> None:
        labels = [max(byte, 0) for byte in node]
        base = next(b for b in range(1, 1 << 21) if all(b ^ label not in units for label in labels))
        units[at] |= (at ^ base) << 10 | (1 << 8 if -1 in node else 0)
        for byte, below in node.items():
            units[base ^ max(byte, 0)] = below | 1 << 31 if byte < 0 else byte
        for byte, below in node.items():
            if byte >= 0:
                place(base ^ byte, below)

    place(0, trie)
    size = (max(units) | 255) + 1
    array = struct.pack(f"<{size}I", *(units.get(index, 0) for index in range(size)))
    return struct.pack("<I", len(array)) + array + bytes(texts)


def nfkc_map() -> bytes:
    """A part of NFKC, and white space, as T5's tokenizer has it."""
    codes = [*range(0xA0, 0x250), *range(0x2460, 0x24FF), *range(0xFF00, 0xFFEF), 0xFB01, 0x2122]
    pairs = {chr(code): unicodedata.normalize("NFKC", chr(code)) for code in codes}
    pairs.update(
        {a + m: unicodedata.normalize("NFC", a + m) for a in "aeo" for m in "\u0301\u0308"}
    )
    pairs.update({"\t": " ", "\n": " ", "\r": " ", "\u0300": "", "\x7f": "", "가": "ga"})
    return charsmap({key: value for key, value in pairs.items() if key != value})


def t5() -> tokenizers.Tokenizer:
    steps = [
        normalizers.Precompiled(nfkc_map()),
        normalizers.Strip(left=False, right=True),
        normalizers.Replace(Regex(" {2,}"), MARK),
    ]
    return unigram(normalizers.Sequence(steps))


ZOO: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": lambda: family("smollm"),
    "qwen2": lambda: family("qwen2"),
    "llama3": lambda: family("llama3"),
    "gpt-4o": lambda: family("gpt-4o"),
    "deepseek-coder": lambda: family("deepseek-coder"),
    "default": lambda: family("default"),
    "falcon": falcon,
    "removed": lambda: split_by("removed", True),
    "contiguous": lambda: split_by("contiguous", False),
    "merged_with_previous": lambda: split_by("merged_with_previous", False),
    "merged_with_next": lambda: split_by("merged_with_next", True),
    "normalised": normalised,
    "llama2": sentencepiece_bpe,
    "gemma": lambda: sentencepiece_bpe(prefix=False),
    "metaspace first": lambda: sentencepiece_bpe("first"),
    "metaspace never": lambda: sentencepiece_bpe("never"),
    "unknown": lambda: sentencepiece_bpe(fallback=False, fuse=False),
    "unigram": unigram,
    "unigram bytes": lambda: unigram(fallback=True, split=False),
    "t5": t5,
}


def wrap(backend: tokenizers.Tokenizer, template: str | None = None) -> Tokenizer:
    """A runtime tokenizer that begins texts with <s> where its own rules say so."""
    files = {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}}
    return Tokenizer(backend, {**files, **({"chat_template": template} if template else {})})
