"""The doctor's report as a person reads it, and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .examine import Report
from .packages import Check, Status

TITLES = {
    "machine": "This machine",
    "engine": "Engine",
    "memory": "Memory",
    "packages": "Packages",
    "server": "Server",
    "services": "Services",
}
_MARKS: dict[Status, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "warn": ("!", "!", "yellow"),
    "missing": ("·", "-", "dim"),
    "broken": ("✗", "X", "bold red"),
}
"""Status -> mark, mark where the terminal has ASCII only, style."""
_WIDTH = 120
_NAMES = 17


def as_json(report: Report) -> str:
    """The checks, and what they come to."""
    checks = [asdict(check) for check in report.checks]
    return json.dumps({"ok": report.ok, "engine": report.engine, "loader": report.loader, "checks": checks}, indent=1)


def show(report: Report, console: Console) -> None:
    """Print it, a block per section; what mends a fault stands under it."""
    fancy = console.encoding.lower().startswith("utf")
    for section, title in TITLES.items():
        checks = [check for check in report.checks if check.section == section]
        if not checks:
            continue
        table = Table.grid(padding=(0, 1))
        table.add_column(width=2)
        table.add_column(width=_NAMES)
        table.add_column(overflow="fold")
        for check in checks:
            table.add_row(*_row(check, fancy))
        console.print(Text(title, style="bold"))
        console.print(table)
    console.print(_verdict(report))


def console() -> Console:
    """Of standard output; wide where nobody looks, so that lines stay whole in a file."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=_WIDTH)


def _row(check: Check, fancy: bool) -> tuple[Text, Text, Text]:
    mark, plain, style = _MARKS[check.status]
    found = Text(check.found, style="dim" if check.status == "missing" else "")
    if check.fix is not None:
        found.append(": " if check.status == "missing" else "\n").append(check.fix, style="cyan")
    return Text(mark if fancy else plain, style=style), Text(check.name), found


def _verdict(report: Report) -> Text:
    if not report.ok:
        broken = ", ".join(check.name for check in report.checks if check.status == "broken")
        return Text(f"Broken: {broken}", style="bold red")
    if report.engine is None:
        return Text("Ready as a client: give it the URL of a server", style="bold green")
    return Text(f"Ready: engine {report.engine}, loader {report.loader}", style="bold green")
