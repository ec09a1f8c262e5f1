"""What a verification found: checks in three layers, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bessemer.errors import BessemerError

if TYPE_CHECKING:
    from rich.console import Console

# The layers, in the order in which they are checked: a later one builds on the ones before.
FILES = "files"
MEMORY = "memory"
NUMBERS = "numbers"
# Where the first difference arises; only looked for when the numbers differ.
STAGES = "stages"
LAYERS = (FILES, MEMORY, NUMBERS, STAGES)

Outcome = tuple[bool, str]


@dataclass(frozen=True)
class Check:
    """One check. detail: what was compared and how it came out, or what is wrong."""

    layer: str
    name: str
    ok: bool
    detail: str

    def to_json(self) -> dict[str, Any]:
        return {"name": f"{self.layer}: {self.name}", "ok": self.ok, "detail": self.detail}


@dataclass
class Report:
    """All checks of one model. subject: which one.  measured: numbers that checks have found, by
    name, for programs that follow them.
    """

    subject: str
    checks: list[Check] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every check holds. A report without checks proves nothing."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    def to_json(self) -> dict[str, Any]:
        """`{"ok": bool, "checks": [{"name": str, "ok": bool, "detail": str}]}`, and `"measured":
        {name: number}` where something was. A number that is not finite is null.
        """
        found: dict[str, Any] = {"ok": self.ok, "checks": [c.to_json() for c in self.checks]}
        if self.measured:
            found["measured"] = {
                name: value if math.isfinite(value) else None
                for name, value in self.measured.items()
            }
        return found

    def add(self, layer: str, name: str, ok: bool, detail: str) -> bool:
        self.checks.append(Check(layer, name, bool(ok), detail))
        return bool(ok)

    def attempt(self, layer: str, name: str, check: Callable[[], Outcome]) -> bool:
        """Run a check and add its outcome. Whatever it raises is a failure of that check: what is
        verified may be damaged in any way.
        """
        try:
            ok, detail = check()
        except BessemerError as error:
            ok, detail = False, str(error)
        except Exception as error:
            ok, detail = False, f"{type(error).__name__}: {error}"
        return self.add(layer, name, ok, detail)

    def print(self, console: Console) -> None:
        """The table."""
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=escape(self.subject), title_justify="left", expand=False)
        table.add_column("layer", no_wrap=True)
        table.add_column("check", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("detail", overflow="fold")
        before = None
        for check in self.checks:
            if before is not None and check.layer != before:
                table.add_section()
            layer = check.layer if check.layer != before else ""
            mark = "[green]ok[/]" if check.ok else "[bold red]FAIL[/]"
            table.add_row(layer, escape(check.name), mark, escape(check.detail))
            before = check.layer
        console.print(table)
        count = len(self.checks)
        if self.ok:
            console.print(f"[green]verified[/]: {count} checks hold")
        else:
            console.print(f"[bold red]not verified[/]: {len(self.failed)} of {count} checks fail")
