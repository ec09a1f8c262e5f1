"""Stages `graph` and `passes`: the model as a graph, and what each pass makes of it."""

from __future__ import annotations

from bessemer.errors import UsageError
from bessemer.graph import print_graph
from bessemer.inspect.page import Page, columns
from bessemer.inspect.subject import Subject

FORMS = ("imported", "prefill", "decode")
# Changes of op counts that fit a line of the table; the rest is counted.
CHANGES_SHOWN = 8


def graph(subject: Subject, form: str, after: str | None) -> Page:
    """The text of a graph: as it was imported, as code is generated for it, or after a pass."""
    if form not in FORMS:
        raise UsageError(f"--of {form}: choose one of {', '.join(FORMS)}")
    text = _after_pass(subject, after, form) if after else _whole(subject, form)
    return Page(text, {"graph": text})


def _whole(subject: Subject, form: str) -> str:
    """A graph that the artifact keeps under ir/, or a new one."""
    name = "imported" if form == "imported" else f"forward_{form}"
    kept = subject.kept(f"ir/{name}.graph")
    if kept is not None:
        return kept
    compilation = subject.located
    lowered = compilation.lowered
    graphs = {
        "imported": compilation.imported.graph,
        "prefill": lowered.prefill,
        "decode": lowered.decode,
    }
    return print_graph(graphs[form], locations=True)


def _after_pass(subject: Subject, after: str, form: str) -> str:
    """The graph after a pass: by name (its last run), or by the number that `passes` shows."""
    from bessemer.passes.pipeline import PHASES, PassOptions, lower

    names = list(dict.fromkeys(p.name for passes in PHASES.values() for p in passes))
    if not after[:1].isdigit() and after not in names:  # before the import
        raise UsageError(f"--after {after}: no such pass; there are {', '.join(names)}")
    imported = subject.located.imported.graph
    dumps = lower(imported, options=PassOptions(dump=True)).dumps
    wanted = [k for k in dumps if after in (k, k.split("-", 2)[2], k.split("-", 1)[0].lstrip("0"))]
    if form == "prefill":
        wanted = [k for k in wanted if k.split("-", 2)[1] != "decode"]
    if not wanted:
        known = ", ".join(dict.fromkeys(k.split("-", 2)[2] for k in dumps))
        raise UsageError(f"--after {after}: no such pass; there are {known}")
    return dumps[wanted[-1]]


def passes(subject: Subject) -> Page:
    """Op counts before and after each pass, what changed, and the time."""
    trace = subject.compilation.lowered.trace
    rows: list[list[object]] = [["#", "phase", "pass", "ops", "", "", "ms", "changes"]]
    data = []
    for number, record in enumerate(trace, 1):
        before, after = sum(record.before.values()), sum(record.after.values())
        changes = [f"{op} {d:+}" for op, d in record.changed.items()]
        shown = ", ".join(changes[:CHANGES_SHOWN])
        more = len(changes) - CHANGES_SHOWN
        shown += f" and {more} more" if more > 0 else ""
        ms = f"{record.seconds * 1e3:.1f}"
        rows.append([number, record.phase, record.name, before, "->", after, ms, shown])
        data.append(
            {
                "phase": record.phase,
                "pass": record.name,
                "before": record.before,
                "after": record.after,
                "seconds": record.seconds,
            }
        )
    return Page(columns(rows, right=(0, 3, 5, 6)) + "\n" + _totals(subject), data)


def _totals(subject: Subject) -> str:
    lowered = subject.compilation.lowered
    counts = {
        "imported": subject.compilation.imported.graph.op_counts(),
        "prefill": lowered.prefill.op_counts(),
        "decode": lowered.decode.op_counts(),
    }
    ops = sorted({op for table in counts.values() for op in table})
    rows: list[list[object]] = [["op", *counts]]
    rows += [[op, *(table.get(op, "") for table in counts.values())] for op in ops]
    rows.append(["all", *(sum(table.values()) for table in counts.values())])
    return columns(rows, right=(1, 2, 3))
