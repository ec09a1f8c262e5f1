"""How byte-level BPE tokenizers split text before merging, by GGUF's ``tokenizer.ggml.pre``.

GGUF stores only a name for it. The patterns are those of the models' own tokenizer.json; each of a
sequence is applied to the pieces that the one before left. The table holds what occurs with the
architectures that can be read, and a name that is not in it is an error: splitting like GPT-2 by
default gives other tokens than the model was trained on, and nothing would show it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """The splitting rules of a family of tokenizers.

    Attributes:
        patterns: regular expressions, applied one after the other.
        nfc: whether text is first brought to Unicode normal form C.
        ignore_merges: whether a piece that is a token as a whole is taken without merging.
        adds_bos: whether a BOS is prepended if the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(numbers: str) -> str:
    """The pattern family of OpenAI's cl100k vocabulary; `numbers` says how digits are grouped."""
    word = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTION}|{word}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _o200k(numbers: str, contraction: str) -> str:
    """The pattern family of o200k: words are split where the case changes."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{contraction}|{start}{upper}+{lower}*{contraction}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_GPT2 = PreTokenizer((GPT2,))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", GPT2))
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),), nfc=True)
_STABLELM2 = PreTokenizer((_cl100k(r"\p{N}"),))
_CL100K = PreTokenizer((_cl100k(r"\p{N}{1,3}"),))
_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, adds_bos=True)
_TEKKEN = PreTokenizer((_o200k(r"\p{N}", ""),), ignore_merges=True, adds_bos=True)
_O200K = PreTokenizer((_o200k(r"\p{N}{1,3}", f"{_CONTRACTION}?"),))
_DEEPSEEK_CODER = PreTokenizer(
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")
)
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _DEFAULT,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "a.x-4.0": _GPT2,
    "mellum": _GPT2,
    "trillion": _GPT2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "command-r": _DIGITS_GPT2,
    "codeshell": _DIGITS_GPT2,
    "exaone": _DIGITS_GPT2,
    "minerva-7b": _DIGITS_GPT2,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": _STABLELM2,
    "dbrx": _CL100K,
    "smaug-bpe": _CL100K,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "tekken": _TEKKEN,
    "gpt-4o": _O200K,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
}
"""The known values of ``tokenizer.ggml.pre``."""
