"""Text to token ids and back, from the tokenizer files of a model or an artifact.

`tokenizer.json` does the work, through the `tokenizers` library. The files around it say which
tokens begin and end a text: `tokenizer_config.json`, `special_tokens_map.json`,
`generation_config.json` and `config.json`, each of which may be absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.arguments import shown
from bessemer.errors import ArtifactError, UsageError
from bessemer.runtime.pieces import PieceDecoder, PieceRules, rules_for

if TYPE_CHECKING:
    import tokenizers

# The roles that Hugging Face files give a token by name.
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_ROLES = ("additional_special_tokens", "extra_special_tokens")


class Tokenizer:
    """A model's tokenizer.

    bos_id: the id that starts a text, or None. eos_ids: every id that ends an answer. vocab_size:
    the highest id plus one, added tokens included; a model's logits may be longer. missing_ids: the
    holes below it. special_tokens: role (`bos_token`, ...) to text, as chat templates see them.
    chat_template: the source, or name to source where a model has several, or None.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, files: Mapping[str, Any] | None = None
    ) -> None:
        """Wrap a `tokenizers` tokenizer; `files` maps a file's name to its parsed JSON."""
        files = files or {}
        self._backend = backend
        # A stored truncation would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        config: Mapping[str, Any] = files.get("tokenizer_config.json", {})
        declared_added = _add_missing_tokens(backend, config.get("added_tokens_decoder") or {})

        ids = set(backend.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(ids, default=-1) + 1
        self.missing_ids = frozenset(range(self.vocab_size)) - ids

        special_map: Mapping[str, Any] = files.get("special_tokens_map.json", {})
        self.special_tokens = _named_tokens(config, special_map)
        self.chat_template: str | dict[str, str] | None = files.get("chat_template")
        self.bos_id = self._bos_id(config, special_map, files)
        self.eos_ids = self._eos_ids(files)
        self._special_ids = self._find_special_ids(declared_added, config, special_map)
        add_bos = config.get("add_bos_token")
        self._add_bos = add_bos if isinstance(add_bos, bool) else None
        state = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self._rules = rules_for(state)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer in `folder`.

        Raises ArtifactError when tokenizer.json is missing or any of the files is damaged.
        """
        from tokenizers import Tokenizer as Backend

        root = Path(folder)
        path = root / "tokenizer.json"
        try:
            # Not Backend.from_file: that can't open every path that Python can.
            source = path.read_bytes()
        except FileNotFoundError:
            raise ArtifactError(
                f"{root} has no tokenizer.json: text can't be turned into tokens. Copy the "
                "model's tokenizer.json there, or compile the model again"
            ) from None
        except OSError as error:
            raise ArtifactError(f"{path} can't be read: {error.strerror or error}") from None
        try:
            backend = Backend.from_buffer(source)
        except Exception as error:  # the library raises bare Exception
            raise ArtifactError(f"{path} is damaged: {error}") from None
        return cls(backend, _read_side_files(root))

    # -- text to ids ---------------------------------------------------------------------------

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The ids of `text`.

        add_special: start with BOS when this tokenizer does that. A text that brings its own BOS
        (a rendered chat template) does not get a second one. `add_bos_token` in the tokenizer's
        configuration wins over what tokenizer.json adds by itself.
        Raises UsageError when the text holds code points that are no characters.
        """
        plain: list[int] | None = None
        ids = self._encode(text, add_special)
        if not add_special or self.bos_id is None:
            return ids
        bos = self.bos_id
        if ids[:1] == [bos] and (self._add_bos is False or ids[1:2] == [bos]):
            plain = self._encode(text, False)
            own = _leading(plain, bos)
            wanted = max(own, 0 if self._add_bos is False else 1)
            ids = [bos] * wanted + ids[_leading(ids, bos) :]
        elif ids[:1] != [bos] and self._add_bos:
            ids = [bos, *ids]
        return ids

    def encode_chat(self, rendered: str) -> list[int]:
        """The ids of a rendered chat template, which brings its own special tokens, BOS included.

        As transformers' `apply_chat_template` does it: nothing is added.
        """
        return self.encode(rendered, add_special=False)

    def _encode(self, text: str, add_special: bool) -> list[int]:
        if not isinstance(text, str):
            raise UsageError(f"{shown(text)} can't be encoded; it must be text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X}) at position "
                f"{error.start}; give it as valid UTF-8"
            ) from None
        return self._backend.encode(text, add_special_tokens=add_special).ids

    # -- ids to text ---------------------------------------------------------------------------

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of `ids`; ids that the tokenizer doesn't know add nothing.

        skip_special: leave special tokens out. Bytes that aren't UTF-8 become U+FFFD.
        """
        shown = [i for i in ids if not (skip_special and self.is_special(i))]
        if self._rules is None:
            known = [i for i in shown if self.token(i) is not None]
            return self._backend.decode(known, skip_special_tokens=False)
        decoder = PieceDecoder(self._rules)
        tokens = (self.token(i) for i in shown)
        text = "".join([decoder.push(token) for token in tokens if token is not None])
        return text + decoder.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, special tokens by their name; empty when unknown.

        Nothing is stripped: a token with a leading space keeps it.
        """
        token = self.token(token_id)
        if token is None:
            return b""
        if self.is_special(token_id):
            return token.encode()
        if self._rules is None:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        return self._rules.to_bytes(token)

    def token_text(self, token_id: int) -> str:
        """The text of a token by itself: as `token_bytes`, with U+FFFD for what is no character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token(self, token_id: int) -> str | None:
        """The vocabulary entry of an id, as the tokenizer writes it, or None."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, or None."""
        return self._backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """Whether a token is a mark (BOS, EOS, turn markers) and not text."""
        return token_id in self._special_ids

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, with all added tokens. It must not be changed."""
        return self._backend

    @property
    def add_bos(self) -> bool | None:
        """What the configuration says about a BOS before a plain text; None where it doesn't."""
        return self._add_bos

    @property
    def piece_rules(self) -> PieceRules | None:
        """How tokens become bytes, or None when the decoder isn't one that is understood."""
        return self._rules

    # -- special tokens ------------------------------------------------------------------------

    @property
    def bos_token(self) -> str | None:
        """The text of BOS, or None."""
        return None if self.bos_id is None else self.token(self.bos_id)

    @property
    def eos_token(self) -> str | None:
        """The text of the tokenizer's own EOS, or None."""
        return self.special_tokens.get("eos_token")

    @cached_property
    def adds_bos(self) -> bool:
        """Whether a plain text gets a BOS."""
        return self.bos_id is not None and self.encode("")[:1] == [self.bos_id]

    def _bos_id(
        self, config: Mapping[str, Any], special_map: Mapping[str, Any], files: Mapping[str, Any]
    ) -> int | None:
        if "bos_token" in self.special_tokens:
            return self.token_id(self.special_tokens["bos_token"])
        if "bos_token" in config or "bos_token" in special_map:
            return None  # declared to be none, whatever the model's configuration says
        for name in ("generation_config.json", "config.json"):
            for token_id in self._ids_in(files.get(name, {}), "bos_token_id"):
                return token_id
        return None

    def _eos_ids(self, files: Mapping[str, Any]) -> frozenset[int]:
        """The union of what the generation config, the model config and the tokenizer declare."""
        found = set(self._ids_in(files.get("generation_config.json", {}), "eos_token_id"))
        found.update(self._ids_in(files.get("config.json", {}), "eos_token_id"))
        named = self.token_id(self.special_tokens.get("eos_token", ""))
        if named is not None:
            found.add(named)
        return frozenset(found)

    def _ids_in(self, config: Mapping[str, Any], key: str) -> Iterator[int]:
        """The ids under `key` (one or a list), also in a multimodal model's text_config."""
        for part in (config, config.get("text_config")):
            value = part.get(key) if isinstance(part, Mapping) else None
            for item in value if isinstance(value, list) else [value]:
                if type(item) is int and 0 <= item < self.vocab_size:
                    yield item

    def _find_special_ids(
        self,
        declared_added: Iterable[int],
        config: Mapping[str, Any],
        special_map: Mapping[str, Any],
    ) -> frozenset[int]:
        """Special added tokens, BOS and EOS, and tokens with another role if they are added tokens.

        The last condition keeps an ordinary token visible that is named as a filler ("!" as the
        padding of some Llama 3 models, a newline as an EOS of code models).
        """
        added = self._backend.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special} | set(declared_added)
        named = [self.token_id(text) for text in self.special_tokens.values()]
        named += [self.token_id(text) for text in _extra_tokens(config, special_map)]
        special.update(i for i in [*named, *self.eos_ids] if i is not None and i in added)
        own_eos = self.token_id(self.special_tokens.get("eos_token", ""))
        special.update(i for i in (self.bos_id, own_eos) if i is not None)
        return frozenset(special)


def _leading(ids: Sequence[int], token_id: int) -> int:
    """How many times `token_id` stands at the start of `ids`."""
    count = 0
    while count < len(ids) and ids[count] == token_id:
        count += 1
    return count


def _text(value: Any) -> str | None:
    """A token's text from a plain string or a serialised AddedToken."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _named_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    """Role to text; tokenizer_config.json wins, also where it says null."""
    named: dict[str, str] = {}
    for role in ROLES:
        text = _text(config[role] if role in config else special_map.get(role))
        if text is not None:
            named[role] = text
    return named


def _extra_tokens(*sources: Mapping[str, Any]) -> Iterator[str]:
    """The special tokens that are listed without a role."""
    for source in sources:
        for key in EXTRA_ROLES:
            value = source.get(key) or []
            for item in value.values() if isinstance(value, Mapping) else value:
                text = _text(item)
                if text is not None:
                    yield text


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, declared: Mapping[str, Mapping[str, Any]]
) -> list[int]:
    """Add tokens that only tokenizer_config.json lists; returns the ids that it calls special."""
    from tokenizers import AddedToken

    special: list[int] = []
    for key, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        token_id, content = int(key), entry["content"]
        if backend.token_to_id(content) is None:
            flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
            token = AddedToken(content, **{f: entry[f] for f in flags if f in entry})
            backend.add_tokens([token])
        found = backend.token_to_id(content)
        if found != token_id:
            raise ArtifactError(
                f"tokenizer_config.json gives {content!r} the id {token_id}, but tokenizer.json "
                f"makes it {found}: the two files don't belong together"
            )
        if entry.get("special"):
            special.append(token_id)
    return special


def _read_json(path: Path) -> Any:
    """The parsed file, or an empty dict when there is none."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ArtifactError(f"{path} can't be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON: {error}") from None


def _read_side_files(root: Path) -> dict[str, Any]:
    """The files beside tokenizer.json, by name, and the chat template under "chat_template"."""
    files: dict[str, Any] = {}
    for name in (
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "config.json",
    ):
        files[name] = _read_json(root / name)
        if not isinstance(files[name], dict):
            raise ArtifactError(f"{root / name} holds no JSON object")
    files["chat_template"] = _read_chat_template(root, files["tokenizer_config.json"])
    return files


def _read_chat_template(root: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template: chat_template.jinja, else the configuration's, else chat_template.json.

    Several come from a list in the configuration or from additional_chat_templates/NAME.jinja.
    """
    template = config.get("chat_template") or _read_json(root / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    sources = {"default": root / "chat_template.jinja"}
    sources.update(
        {p.stem: p for p in sorted((root / "additional_chat_templates").glob("*.jinja"))}
    )
    found = {name: _read_template(path) for name, path in sources.items() if path.is_file()}
    if not found:
        return template
    if isinstance(template, str):
        template = {"default": template}
    merged = {**(template or {}), **found}
    return merged["default"] if set(merged) == {"default"} else merged


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} can't be read: {error}") from None
