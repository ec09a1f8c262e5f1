"""A folder's tokenizer files become tokenizer.bin."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bessemer.artifact.text.added import write_added_tokens, write_surroundings
from bessemer.artifact.text.chat_forms import NOTHING, chat_forms, write_chat
from bessemer.artifact.text.format import TokenizerFile, checksum
from bessemer.artifact.text.normalizer import write_normalizer
from bessemer.artifact.text.pretokenizer import Automata, write_pretokenizer
from bessemer.artifact.text.vocabulary import check_model, write_model
from bessemer.runtime.tokenizer import Tokenizer

TOKENIZER_FILE = "tokenizer.bin"


@dataclass(frozen=True)
class WrittenTokenizer:
    """content: the file.  checksum: what tells it from others.  note: what a user should know
    about its chat prompt, or "".
    """

    content: bytes
    checksum: int
    note: str


def build_tokenizer_file(tokenizer: Tokenizer) -> WrittenTokenizer:
    """The file for a tokenizer.

    Raises NotConvertible, an UnsupportedError that names the part, for a tokenizer that does
    something the runner can't. A chat template that is more than pieces around the texts is no
    error: `note` says so, and the runner then takes --raw alone.
    """
    # What the library writes, not the file it read: one form of everything, all tokens added.
    state = json.loads(tokenizer.backend.to_str())
    file, automata = TokenizerFile(), Automata()
    write_normalizer(file, state["normalizer"], automata)
    write_added_tokens(file, tokenizer, state["added_tokens"])
    over_bytes = write_pretokenizer(file, state["pre_tokenizer"], automata)
    automata.write(file)
    write_model(file, tokenizer, state["model"], over_bytes)
    write_surroundings(file, tokenizer, state["post_processor"])
    forms, reason = chat_forms(tokenizer)
    write_chat(file, forms)
    content = file.to_bytes()
    return WrittenTokenizer(content, checksum(content), _note(forms[NOTHING], reason))


def check_convertible(tokenizer: Tokenizer) -> None:
    """Raise NotConvertible for a tokenizer that `build_tokenizer_file` would refuse, after a part
    of its work: all but the tables of the vocabulary.
    """
    state = json.loads(tokenizer.backend.to_str())
    file, automata = TokenizerFile(), Automata()
    write_normalizer(file, state["normalizer"], automata)
    over_bytes = write_pretokenizer(file, state["pre_tokenizer"], automata)
    check_model(tokenizer, state["model"], over_bytes)
    write_surroundings(file, tokenizer, state["post_processor"])


def _note(plain: object, reason: str) -> str:
    if not reason:
        return ""
    way = "it takes --raw alone" if plain is None else "it takes no --system"
    return f"the standalone runner: {reason}, so {way}"


def write_tokenizer_file(folder: Path) -> WrittenTokenizer:
    """Write `folder`/tokenizer.bin from the tokenizer files beside it. Errors as
    `build_tokenizer_file`, and ArtifactError where there is no tokenizer.
    """
    written = build_tokenizer_file(Tokenizer.load(folder))
    (folder / TOKENIZER_FILE).write_bytes(written.content)
    return written
