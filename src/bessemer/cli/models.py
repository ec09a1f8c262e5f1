"""`bessemer models`: what can be run here without fetching anything."""

from __future__ import annotations

import json as json_format
import sys
import time
from typing import Annotated, Any

from cyclopts import Parameter

from bessemer.cli.options import Json
from bessemer.errors import BessemerError, UsageError


def models(
    *,
    remove: Annotated[
        str | None, Parameter(help="Remove a compiled model from the cache, by its key.")
    ] = None,
    json: Json = False,
) -> int:
    """List known aliases, models in the hub's cache, and compiled models in ours."""
    from bessemer.artifact import cache

    if remove is not None:
        if not remove:
            raise UsageError("--remove needs a key, or its beginning; `bessemer models` lists them")
        fitting = [m for m in cache.cached_models() if m.key.startswith(remove)]
        if len(fitting) != 1:
            raise UsageError(
                f"--remove {remove}: the keys of {len(fitting) or 'no'} compiled models begin so; "
                "`bessemer models` lists them"
            )
        gone = fitting[0]
        cache.remove(gone.key)
        print(f"bessemer: removed {gone.name} ({size_text(gone.nbytes)})", file=sys.stderr)
        return 0
    found = {"aliases": _aliases(), "hub": _hub_models(), "compiled": _compiled()}
    if json:
        print(json_format.dumps(found, ensure_ascii=False))
    else:
        _show(found)
    return 0


def _aliases() -> list[dict[str, Any]]:
    from bessemer.importer.checkpoint import ALIASES, resolve

    listed = []
    for name in ALIASES:
        try:
            listed.append({"name": name, "path": str(resolve(name)), "missing": None})
        except BessemerError as error:
            listed.append({"name": name, "path": None, "missing": str(error)})
    return listed


def _hub_models() -> list[dict[str, Any]]:
    """Repositories in the hub's cache that hold something that can be compiled."""
    try:
        import huggingface_hub

        repositories = huggingface_hub.scan_cache_dir().repos
    except Exception:  # no client, no cache, or one it can't read: nothing to list
        return []
    listed = []
    for repository in repositories:
        names = {f.file_name for r in repository.revisions for f in r.files}
        ggufs = sorted(n for n in names if n.endswith(".gguf"))
        weights = any(n.endswith(".safetensors") for n in names)
        if repository.repo_type != "model" or not (ggufs or ("config.json" in names and weights)):
            continue
        entries = [] if "config.json" not in names or not weights else [repository.repo_id]
        entries += [f"{repository.repo_id}/{name}" for name in ggufs]
        path, size = str(repository.repo_path), repository.size_on_disk
        listed += [{"name": name, "bytes": size, "path": path} for name in entries]
    return sorted(listed, key=lambda entry: str(entry["name"]))


def _compiled() -> list[dict[str, Any]]:
    from bessemer.artifact import cache
    from bessemer.artifact.reader import read_manifest

    listed = []
    for model in cache.cached_models():
        manifest = read_manifest(model.folder)
        listed.append(
            {
                "name": model.name,
                "key": model.key,
                "weights": manifest.options.get("weights") or "f16",
                "kv": manifest.options.get("kv"),
                "context": manifest.context_length,
                "bytes": model.nbytes,
                "last_used": time.strftime("%Y-%m-%d %H:%M", time.localtime(model.used)),
                "path": str(model.folder),
            }
        )
    return listed


def _show(found: dict[str, list[dict[str, Any]]]) -> None:
    from bessemer.artifact import cache

    print("Known names:")
    print_columns([[e["name"], e["path"] or e["missing"]] for e in found["aliases"]])
    if found["hub"]:
        print("\nIn the hub's cache:")
        print_columns([[e["name"], size_text(e["bytes"])] for e in found["hub"]])
    if not found["compiled"]:
        print(f"\nNo compiled models in {cache.cache_root()} yet.")
        return
    print(f"\nCompiled, in {cache.cache_root()}:")
    rows = [["name", "weights", "KV", "context", "size", "last used", "key"]]
    for e in found["compiled"]:
        size, key = size_text(e["bytes"]), e["key"][:12]
        context = str(e["context"])
        rows.append([e["name"], e["weights"], e["kv"], context, size, e["last_used"], key])
    print_columns(rows)


def print_columns(rows: list[list[str]]) -> None:
    """Rows of texts, aligned; never cut, so that they can be piped."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (f"{text:<{width}}" for text, width in zip(row, widths, strict=True))
        print("  " + "  ".join(cells).rstrip())


def size_text(nbytes: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
