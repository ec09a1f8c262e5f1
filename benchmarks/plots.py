"""Plots of `compare.py`'s results.json, beside it: bars of tokens a second, and a roofline.

python benchmarks/plots.py build/compare/results/results.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS = "Bessemer"
MARKERS = "os^Dv*PX"
WIDTH, HEIGHT = 4.2, 4.0
"""Inches of a panel."""


def colours(engines: Sequence[str]) -> dict[str, Any]:
    """One for each engine, the same in all panels; Bessemer's stands out."""
    cycle = plt.get_cmap("tab10")
    others = [e for e in engines if e != OURS]
    table = {e: cycle((i + 1) % 10) for i, e in enumerate(others)}
    table[OURS] = cycle(3) if not others else "black"
    return table


def bars(found: Mapping[str, Any], path: Path) -> None:
    """A row for each precision and number of threads, a panel for each trial."""
    rounds = found["rounds"]
    trials = list(dict.fromkeys(r["test"] for r in found["results"]))
    engines = list(dict.fromkeys(r["engine"] for r in found["results"]))
    table = colours(engines)
    size = (WIDTH * len(trials), HEIGHT * len(rounds))
    figure, axes = plt.subplots(len(rounds), len(trials), figsize=size, squeeze=False)
    for row, one in zip(axes, rounds, strict=True):
        for axis, trial in zip(row, trials, strict=True):
            mine = _of(found["results"], one, trial)
            mine.sort(key=lambda r: r["tokens_per_second"])
            heights = [r["tokens_per_second"] for r in mine]
            spread = [
                [r["tokens_per_second"] - r["min"] for r in mine],
                [r["max"] - r["tokens_per_second"] for r in mine],
            ]
            names = [r["engine"] for r in mine]
            axis.barh(names, heights, xerr=spread, color=[table[n] for n in names], capsize=2)
            axis.set_title(f"{trial}, {one['precision']}, {one['threads']} threads", fontsize=10)
            axis.set_xlabel("tokens/s")
            axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _of(
    results: Sequence[Mapping[str, Any]], one: Mapping[str, Any], trial: str | None = None
) -> list[Mapping[str, Any]]:
    return [
        r
        for r in results
        if (r["precision"], r["threads"]) == (one["precision"], one["threads"])
        and trial in (None, r["test"])
    ]


def roofline(found: Mapping[str, Any], path: Path) -> None:
    """Operations a second over operations per byte, under the peaks of each round."""
    rounds = found["rounds"]
    engines = list(dict.fromkeys(r["engine"] for r in found["results"]))
    trials = list(dict.fromkeys(r["test"] for r in found["results"]))
    table = colours(engines)
    size = (1.5 * WIDTH * len(rounds), 1.2 * HEIGHT)
    figure, axes = plt.subplots(1, len(rounds), figsize=size, squeeze=False)
    for axis, one in zip(axes[0], rounds, strict=True):
        mine = _of(found["results"], one)
        flops, read = one["flops_per_second"] / 1e9, one["read_bytes_per_second"] / 1e9
        low = min(r["intensity"] for r in mine) / 2
        high = max(r["intensity"] for r in mine) * 2
        ridge = min(max(flops / read, low), high)
        axis.plot([low, ridge, high], [low * read, min(flops, ridge * read), flops], color="grey")
        axis.annotate(f"{flops:.0f} GFLOP/s", (high, flops), ha="right", va="bottom", fontsize=8)
        axis.annotate(f"{read:.1f} GB/s", (low, low * read), va="bottom", fontsize=8)
        for result in mine:
            axis.scatter(
                result["intensity"],
                result["flops_per_second"] / 1e9,
                color=[table[result["engine"]]],
                marker=MARKERS[trials.index(result["test"]) % len(MARKERS)],
            )
        for engine in dict.fromkeys(r["engine"] for r in mine):
            axis.scatter([], [], color=[table[engine]], label=engine)
        for i, trial in enumerate(trials):
            axis.scatter([], [], color="grey", marker=MARKERS[i % len(MARKERS)], label=trial)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("operations per byte of weights and cache")
        axis.set_ylabel("GFLOP/s")
        axis.set_title(f"{one['precision']}, {one['threads']} threads", fontsize=10)
        axis.legend(fontsize=7, loc="lower right")
        axis.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path)
    path = parser.parse_args().results
    found = json.loads(path.read_text(encoding="utf-8"))
    if not found["results"]:
        raise SystemExit(f"{path} has no results to draw")
    bars(found, path.with_name("speed.png"))
    roofline(found, path.with_name("roofline.png"))


if __name__ == "__main__":
    main()
