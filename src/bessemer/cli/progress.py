"""How far a compilation is: a bar for each stage on a terminal, a line for each elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

TITLES = {
    "import": "reading the model",
    "passes": "optimising the graph",
    "codegen": "generating code",
    "backend": "compiling",
    "link": "linking",
    "weights": "writing weights",
    "runner": "linking the runner",
}


class StageProgress:
    """A callback `(stage, done, total)` that shows stages on standard error.

    A context manager; the display is opened by the first stage, so that nothing shows where
    nothing is compiled.
    """

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}
        self._terminal = sys.stderr.isatty()

    def __enter__(self) -> StageProgress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        first = stage not in self._began
        began = self._began.setdefault(stage, time.monotonic())
        if self._terminal:
            self._show_bar(stage, done, total)
        elif done >= total and (first or stage not in self._tasks):
            self._tasks[stage] = len(self._tasks)  # type: ignore[assignment]
            seconds = time.monotonic() - began
            print(f"bessemer: {TITLES.get(stage, stage)}: {seconds:.1f} s", file=sys.stderr)

    def _show_bar(self, stage: str, done: int, total: int) -> None:
        if self._bars is None:
            self._bars = _open_bars()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(TITLES.get(stage, stage), total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)


def _open_bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    bars = Progress(
        SpinnerColumn(finished_text="[green]\u2713"),
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=32),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
    bars.start()
    return bars
