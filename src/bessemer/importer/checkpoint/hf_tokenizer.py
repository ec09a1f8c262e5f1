"""The tokenizer of a Hugging Face folder: its files, copied or converted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from bessemer.importer.checkpoint.files import damaged, read_json, write_json

TEMPLATE_FOLDER = "additional_chat_templates"

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
LEGACY = ("tokenizer.model", "vocab.json", "merges.txt", "chat_template.json")
"""Sources that are converted instead of copied."""

FILES = COPIED + LEGACY
"""Every file that the result depends on."""


def has_tokenizer(source: Path) -> bool:
    """Whether the folder holds a tokenizer in any form that can be read."""
    return any((source / name).exists() for name in ("tokenizer.json", "tokenizer.model")) or all(
        (source / name).exists() for name in ("vocab.json", "merges.txt")
    )


def write_tokenizer(source: Path, generation_config: dict[str, Any], target: Path) -> None:
    """Writes the tokenizer of the folder `source` into `target`; see `Checkpoint`."""
    if not has_tokenizer(source):
        raise damaged(source, "no tokenizer: neither tokenizer.json nor tokenizer.model")
    target.mkdir(parents=True, exist_ok=True)
    if (source / "tokenizer.json").exists():
        _check(source / "tokenizer.json")
        for name in COPIED:
            if (source / name).exists():
                # Content only: the copy of a read-only file must stay writable.
                shutil.copyfile(source / name, target / name)
    else:
        _convert(source, target)
    _write_templates(source, target)
    if not (target / "tokenizer_config.json").exists():
        write_json(target / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    write_json(target / "generation_config.json", generation_config)


def _check(path: Path) -> None:
    """tokenizer.json must be one: this is the place to say so, not the first run."""
    from tokenizers import Tokenizer

    read_json(path)
    try:
        Tokenizer.from_file(str(path))
    # The library reports every fault as a bare Exception.
    except Exception as error:
        raise damaged(path, f"can't be loaded as a tokenizer ({error})") from error


def _convert(source: Path, target: Path) -> None:
    """Builds tokenizer.json from an older form, through transformers."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
        tokenizer.save_pretrained(str(target))
    # Whatever a converter throws, the user's answer is the same.
    except Exception as error:
        raise damaged(
            source,
            f"there is no tokenizer.json, and transformers can't make one ({error}); "
            "add the tokenizer.json of the model",
        ) from error
    if not (target / "tokenizer.json").exists():
        raise damaged(source, "its tokenizer has no tokenizer.json form, which running it needs")


def _write_templates(source: Path, target: Path) -> None:
    """Brings the other forms of chat templates to those that the runtime reads."""
    legacy = source / "chat_template.json"
    template = target / "chat_template.jinja"
    if legacy.exists() and not template.exists():
        text = read_json(legacy).get("chat_template")
        if not isinstance(text, str):
            raise damaged(legacy, "holds no chat_template text")
        template.write_text(text, encoding="utf-8")
    extra = sorted((source / TEMPLATE_FOLDER).glob("*.jinja"))
    if extra:
        (target / TEMPLATE_FOLDER).mkdir(exist_ok=True)
        for file in extra:
            shutil.copyfile(file, target / TEMPLATE_FOLDER / file.name)
