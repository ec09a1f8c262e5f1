"""A report as a table for a terminal, as Markdown, or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bessemer.bench.profile import Profile, largest
from bessemer.bench.results import MemoryUse, Report, Result

if TYPE_CHECKING:
    from rich.console import Console

MIB = 1 << 20
HEADER = ("test", "threads", "tokens/s", "±", "min", "max", "first token", "FMA peak", "read peak")
PROFILE_HEADER = ("group", "calls", "ms", "wait ms", "share", "GFLOP/s", "GB/s")


def result_row(result: Result) -> tuple[str, ...]:
    """The cells of a result, by `HEADER`. The share that bounds a test is shown: of multiply-adds
    for prompts, of reading memory for single tokens.
    """
    shares, prompt = result.shares(), result.test.kind == "pp"
    fma = shares["fma_share"] if prompt else None
    read = None if prompt else shares["bandwidth_share"]
    first = f"{result.median_seconds:.3f} s" if prompt else ""
    return (
        result.test.name,
        str(result.threads),
        f"{result.tokens_per_second:.1f}",
        f"{result.deviation:.1f}",
        f"{min(result.rates):.1f}",
        f"{max(result.rates):.1f}",
        first,
        _percent(fma),
        _percent(read),
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def profile_rows(profile: Profile) -> list[tuple[str, ...]]:
    """The cells of a profile, by `PROFILE_HEADER`, the largest group first."""
    total = profile.total or 1.0
    rows: list[tuple[str, ...]] = [
        (
            g.function,
            str(g.calls),
            f"{1e3 * g.seconds:.3f}",
            f"{1e3 * g.wait:.3f}",
            _percent((g.seconds + g.wait) / total),
            f"{g.flops_per_second / 1e9:.1f}" if g.flops_per_second else "",
            f"{g.bytes_per_second / 1e9:.1f}" if g.bytes_per_second else "",
        )
        for g in largest(profile)
    ]
    poll, outside = profile.poll, profile.outside
    rows.append(("(cancel poll)", "", "", f"{1e3 * poll:.3f}", _percent(poll / total), "", ""))
    rows.append(
        ("(between calls)", "", f"{1e3 * outside:.3f}", "", _percent(outside / total), "", "")
    )
    return rows


def threads_text(count: int) -> str:
    """A number of threads in words."""
    return f"{count} thread{'' if count == 1 else 's'}"


def machine_line(machine: dict[str, Any]) -> str:
    """The processor and its measured peaks."""
    parts = [f"{machine['cpu']}, {machine['cores']} cores to use"]
    for peak in machine["peaks"]:
        parts.append(
            f"{threads_text(peak['threads'])}: {peak['flops_per_second'] / 1e9:.0f} GFLOP/s, "
            f"{peak['read_bytes_per_second'] / 1e9:.1f} GB/s read"
        )
    return "; ".join(parts)


def model_line(report: Report) -> str:
    """What was measured, and its loading."""
    model = report.model
    return (
        f"{model['name']}, weights {model['weights']} ({model['weights_bytes'] / MIB:.0f} MiB), "
        f"KV {model['kv']}, context {model['context']}; loaded in {report.load_seconds:.2f} s"
    )


def memory_line(memory: MemoryUse) -> str:
    """Peak memory and its parts."""
    private = "" if memory.private is None else f", private {memory.private / MIB:.0f} MiB"
    return (
        f"peak memory {memory.rss_peak / MIB:.0f} MiB: weights {memory.weights / MIB:.0f}, "
        f"KV {memory.cache / MIB:.0f}, other {memory.other / MIB:.0f}{private}"
    )


def profile_title(profile: Profile) -> str:
    """What a profile is of, and how much of it is waiting."""
    waiting = _percent(profile.waiting / (profile.total or 1.0))
    what = f"{profile.test.name}, {threads_text(profile.threads)}"
    return f"{what}: {1e3 * profile.total:.3f} ms a forward call, {waiting} of it at barriers"


def markdown(report: Report) -> str:
    """The whole report as Markdown."""
    parts = [model_line(report), "", machine_line(report.machine), ""]
    parts += _markdown_table(HEADER, [result_row(r) for r in report.results])
    parts += ["", memory_line(report.memory)]
    for profile in report.profiles:
        parts += ["", profile_title(profile), ""]
        parts += _markdown_table(PROFILE_HEADER, profile_rows(profile))
    return "\n".join(parts) + "\n"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    align = ["---", *["---:"] * (len(header) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (header, align, *rows)]


def comma_separated(report: Report) -> str:
    """The results as CSV, a column for each key of `--json`; the samples are left out."""
    out = io.StringIO()
    rows = [{k: v for k, v in r.to_json().items() if k != "samples"} for r in report.results]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def show(report: Report, console: Console) -> None:
    """Print tables."""
    console.print(model_line(report), highlight=False)
    console.print(machine_line(report.machine), highlight=False)
    _table(console, HEADER, [result_row(r) for r in report.results])
    console.print(memory_line(report.memory), highlight=False)
    for profile in report.profiles:
        console.print("\n" + profile_title(profile), highlight=False)
        _table(console, PROFILE_HEADER, profile_rows(profile))


def _table(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table()
    for i, title in enumerate(header):
        table.add_column(title, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
