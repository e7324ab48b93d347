"""A report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from offbook.base.text import counted
from offbook.llms.ledger import SpendingTotals
from offbook_compare.report import Table, markdown_section

from .task import write_whole


def write_page(
    folder: Path, title: str, verdict: str, tables: Sequence[Table], warnings: Sequence[str] = (), **texts: str
) -> None:
    """Write report.md: what came of it, tables, and texts under their names. Raises ConfigError."""
    parts = [f"# {' '.join(title.split())}", verdict]
    parts += ["\n".join(f"- {warning}" for warning in warnings)] if warnings else []
    parts += map(markdown_section, tables)
    for name, text in texts.items():
        if text:
            parts.append(f"## {name.capitalize()}\n\n" + "\n".join(f"    {line}" for line in text.splitlines()))
    write_whole(folder / "report.md", "\n\n".join(parts) + "\n")


def spending_table(spending: Mapping[str, SpendingTotals], folder: Path) -> Table:
    """What other LLMs were asked, by purpose."""
    head = ("for", "questions", "from the cache", "tokens", "USD")
    total = sum(spending.values(), SpendingTotals())
    rows = [_spent(purpose, totals) for purpose, totals in (*spending.items(), ("in all", total))]
    note = f"Questions to other LLMs, in all runs with the folder {folder}."
    return Table("What did it take?", note, head, tuple(rows))


def _spent(purpose: str, totals: SpendingTotals) -> tuple[str, ...]:
    cost = f"{totals.cost:.4f}" if totals.cost or not totals.unpriced else ""
    unpriced = f"{counted(totals.unpriced, 'request')} of unknown price" if totals.unpriced else ""
    tokens = f"{totals.prompt_tokens:,} + {totals.completion_tokens:,}"
    return purpose, str(totals.questions), str(totals.cached), tokens, " and ".join(filter(None, (cost, unpriced)))
