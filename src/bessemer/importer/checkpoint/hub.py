"""The Hugging Face hub: what compiling needs of a repository, fetched into the client's cache."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors

from bessemer.errors import CheckpointError

PATTERNS = [
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

PATIENCE_S = 5.0
"""Seconds for the hub's first answer. A network that is slower can't bring gigabytes; and without
one the client would try for half a minute, and complain each time."""

SERVER_ERROR = 500


def fetch(repo: str, file: str | None, revision: str | None) -> Path:
    """A GGUF file of a repository, or its folder.

    repo: ``owner/name``.  revision: the default one when None. Where the hub can't be reached, or
    HF_HUB_OFFLINE forbids to ask, what the cache has is taken.

    Raises:
        CheckpointError: it is neither in the cache nor to be had, or no checkpoint.
    """
    silence = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_silent(repo)
    found = _download(repo, file, revision, silence)
    if file is None and not (found / "config.json").exists():
        raise CheckpointError(
            f"{repo}: the hub repository has no config.json. If it holds GGUF files, name one: "
            f"{repo}/FILE.gguf"
        )
    return found


def _why_silent(repo: str) -> str | None:
    """Why the hub gives no answer; None when it gives one, whichever."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    url = f"{constants.ENDPOINT}/{repo}/resolve/main/config.json"

    def ask() -> None:
        try:
            session = huggingface_hub.get_session()
            status = session.head(url, timeout=PATIENCE_S, follow_redirects=False).status_code
            answers.put(f"it answers with error {status}" if status >= SERVER_ERROR else None)
        except Exception as error:  # whatever the client's HTTP library raises
            answers.put(_first_line(error) or type(error).__name__)

    # A thread, since no timeout ends the search for a host's address.
    threading.Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=PATIENCE_S)
    except queue.Empty:
        return f"no answer within {PATIENCE_S:.0f} s"


def _download(repo: str, file: str | None, revision: str | None, silence: str | None) -> Path:
    """Let the client do it; its many errors become one of ours. silence: why only the cache is
    looked into.
    """
    how: dict[str, Any] = {"revision": revision, "local_files_only": silence is not None}
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repo, file, **how))
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=PATTERNS, **how))
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{repo}: access must be granted on the hub first (log in with 'hf auth login')"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        reason = silence or _first_line(error.__cause__ or error)
        name = "/".join(part for part in (repo, file) if part)
        name += f"@{revision}" if revision else ""
        raise CheckpointError(_unreachable(name, reason)) from error
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


def _unreachable(name: str, reason: str) -> str:
    """What was tried, and what to do."""
    tried = f"{name}: no such file or folder here, not in the hub's cache, and the hub"
    local = "give the path of a local folder or .gguf file"
    if constants.HF_HUB_OFFLINE:
        return f"{tried} is not asked ({reason}): unset that, or {local}"
    return (
        f"{tried} can't be reached ({constants.ENDPOINT}: {reason}): {local}, or try again with a "
        "network; HF_HUB_OFFLINE=1 asks the cache alone"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
