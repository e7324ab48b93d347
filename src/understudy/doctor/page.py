"""The doctor's report as text, and as JSON."""

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
"""Section of a check -> its heading, in the order of the report."""
_MARKS: dict[Status, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "warn": ("!", "!", "yellow"),
    "missing": ("·", "-", "dim"),
    "broken": ("✗", "X", "bold red"),
}
"""Status -> mark, mark on a terminal with ASCII only, style."""
_WIDTH = 120
_NAMES = 17


def as_json(report: Report) -> str:
    """The checks, the overall result, and the engine and loader to use, as JSON."""
    checks = [asdict(check) for check in report.checks]
    return json.dumps({"ok": report.ok, "engine": report.engine, "loader": report.loader, "checks": checks}, indent=1)


def show(report: Report, console: Console) -> None:
    """Print the report, a block per section. A fix stands under its fault."""
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
    """The console of standard output. In a file or a pipe it is wide, so that lines stay whole."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal else Console(highlight=False, width=_WIDTH)


def _row(check: Check, fancy: bool) -> tuple[Text, Text, Text]:
    mark, plain, style = _MARKS[check.status]
    text = Text(check.found, style="dim" if check.status == "missing" else "")
    if check.fix is not None:
        text.append(": " if check.status == "missing" else "\n").append(check.fix, style="cyan")
    return Text(mark if fancy else plain, style=style), Text(check.name), text


def _verdict(report: Report) -> Text:
    if not report.ok:
        broken = ", ".join(check.name for check in report.checks if check.status == "broken")
        return Text(f"Broken: {broken}", style="bold red")
    if report.engine is None:
        return Text("Ready as a client: set UNDERSTUDY_URL to the URL of a server", style="bold green")
    return Text(f"Ready: engine {report.engine}, loader {report.loader}", style="bold green")
