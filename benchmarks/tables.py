"""The results of `compare.py` as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

OURS, REFERENCE = "Bessemer", "llama.cpp"
MIB = 1 << 20


def markdown(found: Mapping[str, Any]) -> str:
    """A table for each precision and number of threads, and under it what was run."""
    machine = found["machine"]
    parts = [
        f"# {found['model']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores to use. Tokens a second, medians of turns in "
        "which all engines were measured one after the other; in brackets the lowest and the "
        "highest.",
    ]
    for one in found["rounds"]:
        parts += ["", *_round(one, found["results"])]
    return "\n".join(parts) + "\n"


def _round(one: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[str]:
    mine = [
        r for r in results if (r["precision"], r["threads"]) == (one["precision"], one["threads"])
    ]
    trials = list(dict.fromkeys(r["test"] for r in mine))
    table = {(r["engine"], r["test"]): r for r in mine}
    engines = [e["name"] for e in one["engines"]]
    peaks = (one["flops_per_second"] / 1e9, one["read_bytes_per_second"] / 1e9)
    load = max(one["load_average"])
    lines = [
        f"## {one['precision']}, {one['threads']} thread{'s' if one['threads'] > 1 else ''}",
        "",
        f"Measured in between, at best: {peaks[0]:.0f} GFLOP/s of multiply-adds, "
        f"{peaks[1]:.1f} GB/s read. Highest load average before a turn: {load:.1f}.",
        "",
        f"| engine | {' | '.join(trials)} | peak memory MiB |",
        f"| --- | {' | '.join(['---:'] * (len(trials) + 1))} |",
    ]
    for engine in one["engines"]:
        cells = [_cell(table.get((engine["name"], t))) for t in trials]
        memory = engine["memory"].get("rss_peak")
        cells.append("" if memory is None else f"{memory / MIB:.0f}")
        lines.append(f"| {engine['name']} | {' | '.join(cells)} |")
    if OURS in engines:
        shares = [_share(table.get((OURS, t))) for t in trials]
        lines.append(f"| {OURS}, of the peak | {' | '.join(shares)} | |")
    if {OURS, REFERENCE} <= set(engines):
        ratios = [_ratio(table.get((OURS, t)), table.get((REFERENCE, t))) for t in trials]
        lines.append(f"| {OURS} / {REFERENCE} | {' | '.join(ratios)} | |")
    lines += ["", "; ".join(e["version"] for e in one["engines"]) + "."]
    lines += [f"Left out: {name} ({reason})." for name, reason in one["absent"].items()]
    return lines


def _cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    return f"{result['tokens_per_second']:.1f} ({result['min']:.1f}..{result['max']:.1f})"


def _share(result: Mapping[str, Any] | None) -> str:
    """Of multiply-adds for prompts, of reading memory (weights alone) for single tokens."""
    if result is None:
        return ""
    share = result["fma_share" if result["test"].startswith("pp") else "bandwidth_share"]
    return f"{100 * share:.0f} %"


def _ratio(ours: Mapping[str, Any] | None, theirs: Mapping[str, Any] | None) -> str:
    if ours is None or theirs is None:
        return ""
    return f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f}x"
