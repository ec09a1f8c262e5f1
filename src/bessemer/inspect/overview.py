"""A model on its way, on one screen."""

from __future__ import annotations

from typing import Any

from bessemer.errors import BessemerError
from bessemer.inspect import STAGES
from bessemer.inspect.groups import segments
from bessemer.inspect.memory import layouts
from bessemer.inspect.page import Page, facts, heading, size_text
from bessemer.inspect.subject import Subject
from bessemer.inspect.weights import number_count, stored_weights

_CONFIG = (
    ("layers", "num_hidden_layers"),
    ("hidden", "hidden_size"),
    ("heads", "num_attention_heads"),
    ("KV heads", "num_key_value_heads"),
    ("intermediate", "intermediate_size"),
    ("vocabulary", "vocab_size"),
)


def overview(subject: Subject) -> Page:
    """Source, graph, passes, groups, code, weights and memory, a line or two each."""
    pairs: list[tuple[str, Any]] = [("model", subject.name), *_origin(subject)]
    try:
        pairs += _compilation(subject)
    except BessemerError as error:
        pairs.append(("graph to code", f"not shown: {error}"))
    pairs += _memory(subject)
    text = facts(pairs) + heading("stages") + ", ".join(STAGES) + "\n"
    return Page(text, dict(pairs))


def _origin(subject: Subject) -> list[tuple[str, Any]]:
    if subject.artifact is None:
        config = subject.compilation.imported.config
        pairs: list[tuple[str, Any]] = []
    else:
        manifest = subject.artifact.manifest
        config = dict(manifest.config)
        pairs = [("compiled in", subject.artifact.folder)]
        source = manifest.source
        pairs.append(("source", f"{source.get('kind', '?')} {source.get('path', '')}".strip()))
        files = sum(f.nbytes for f in manifest.files.values())
        seconds = f"in {manifest.compile_seconds:.1f} s"
        pairs.append(("files", f"{len(manifest.files) + 1}, {size_text(files)}, made {seconds}"))
    shown = [f"{name} {config[key]}" for name, key in _CONFIG if config.get(key) is not None]
    if config:
        kind = config.get("model_type", "model")
        pairs.append(("architecture", ", ".join([str(kind), *shown])))
    return pairs


def _compilation(subject: Subject) -> list[tuple[str, Any]]:
    compilation = subject.compilation
    imported, lowered, generated = compilation.imported, compilation.lowered, compilation.generated
    before = len(imported.graph.nodes())
    pairs: list[tuple[str, Any]] = [
        ("graph", f"{before} ops, captured by {imported.capture}"),
        (
            "passes",
            f"{len(lowered.trace)}, {before} -> {len(lowered.prefill.nodes())} ops for prefill, "
            f"{len(lowered.decode.nodes())} for decode",
        ),
    ]
    for name, entry in generated.entries.items():
        functions = {c.function for c in entry.calls}
        loops = [f"{s.count} turns of {s.period}" for s in segments(entry) if s.count > 1]
        barriers = sum(c.barrier for c in entry.calls)
        loop_text = f" ({', '.join(loops)} calls)" if loops else ""
        pairs.append(
            (
                name,
                f"{len(entry.calls)} calls{loop_text} of {len(functions)} functions, "
                f"{barriers} barriers, arena {size_text(entry.arena.nbytes)}",
            )
        )
    sizes = ", ".join(f"{n} {size_text(len(t))}" for n, t in generated.modules.items())
    pairs.append(("MLIR", sizes))
    return pairs


def _memory(subject: Subject) -> list[tuple[str, Any]]:
    table = stored_weights(subject)
    state, scratch = layouts(subject)
    count = sum(number_count(w) for w in table)
    nbytes = sum(w.nbytes for w in table)
    dtypes = "+".join(sorted({w.dtype for w in table}))
    return [
        ("weights", f"{len(table)} tensors, {count:,} numbers, {size_text(nbytes)} as {dtypes}"),
        (
            "state",
            f"{state.capacity} tokens, {len(state.layers) + len(state.shared)} layers of "
            f"{state.kv_dtype} KV, "
            f"{state.kv_bytes_per_token():,} bytes a token, {size_text(state.nbytes)}",
        ),
        (
            "scratch",
            f"{size_text(scratch.shared_bytes)} shared, {size_text(scratch.thread_bytes)} a thread",
        ),
        ("target", _target(subject)),
    ]


def _target(subject: Subject) -> str:
    """The triple and the CPU; of several levels all, the least first."""
    if subject.artifact is not None:
        manifest = subject.artifact.manifest
        target: Any = dict(manifest.target)
        levels = [level.cpu for level in reversed(manifest.levels)]
    else:
        target = subject.compilation.target.to_json()
        levels = [level.target.cpu for level in subject.compilation.levels]
    return ", ".join([target.get("triple", "?"), target.get("cpu", "?"), *levels])
