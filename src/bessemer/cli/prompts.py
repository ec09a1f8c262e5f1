"""The prompt of `bessemer run`: as messages, as token ids, and as a dump of these."""

from __future__ import annotations

import json as json_format
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.errors import CheckpointError

if TYPE_CHECKING:
    from bessemer.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """What a user asks. system: what the model is told before.  raw: without the chat template."""

    text: str
    system: str | None
    raw: bool

    @property
    def messages(self) -> list[dict[str, str]]:
        """As chat templates take them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, {"role": "user", "content": self.text}]

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """The token ids that the model is fed."""
        from bessemer.runtime.chat_template import encode_messages

        return (
            tokenizer.encode(self.text) if self.raw else encode_messages(tokenizer, self.messages)
        )


def find_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a compiled folder or a checkpoint. Nothing is compiled for it.

    Raises CheckpointError or ArtifactError when the model can't be found or comes without one.
    """
    from bessemer.artifact.manifest import is_artifact
    from bessemer.runtime.tokenizer import Tokenizer

    path = Path(name).expanduser()
    if is_artifact(path):
        return Tokenizer.load(path)
    from bessemer.api import check_manifest_is_there
    from bessemer.importer.checkpoint import open_checkpoint

    check_manifest_is_there(path)

    with open_checkpoint(name) as checkpoint, tempfile.TemporaryDirectory() as folder:
        if not checkpoint.has_tokenizer():
            raise CheckpointError(f"{checkpoint.path} comes without a tokenizer: there is no text")
        checkpoint.write_tokenizer(Path(folder))
        config = json_format.dumps(checkpoint.config)
        (Path(folder) / "config.json").write_text(config, encoding="utf-8")
        return Tokenizer.load(folder)


def dump_tokens(name: str, request: Request, *, json: bool) -> int:
    """Print the ids of a prompt with their texts: one line each, or one object."""
    tokenizer = find_tokenizer(name)
    tokens = [(i, tokenizer.token_text(i)) for i in request.ids(tokenizer)]
    if json:
        listed = [{"id": i, "text": text} for i, text in tokens]
        print(json_format.dumps({"count": len(tokens), "tokens": listed}, ensure_ascii=False))
        return 0
    for i, text in tokens:
        print(f"{i:>7}  {json_format.dumps(text, ensure_ascii=False)}")
    print(f"bessemer: {len(tokens)} prompt tokens", file=sys.stderr)
    return 0
