"""A report as Markdown and as one self-contained HTML page."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbook.base.text import counted
from offbook.llms.ledger import SpendingTotals
from offbook_compare.report import Table, html_document, html_table, markdown_section

from .task import write_whole


@dataclass(frozen=True)
class Page:
    """A report: its title, what came of it in a line, tables, and texts with their titles. `picture`: SVG for the HTML;
    Markdown has the table that it shows."""

    title: str
    verdict: str
    tables: Sequence[Table]
    warnings: Sequence[str] = ()
    texts: Sequence[tuple[str, str]] = ()
    picture: str = ""


def write_pages(folder: Path, page: Page) -> None:
    """Write report.md and report.html. Raises ConfigError."""
    title = " ".join(page.title.split())
    markdown = [f"# {title}", page.verdict]
    markdown += ["\n".join(f"- {warning}" for warning in page.warnings)] if page.warnings else []
    markdown += map(markdown_section, page.tables)
    markdown += [f"## {name}\n\n{_indented(text)}" for name, text in page.texts]
    write_whole(folder / "report.md", "\n\n".join(markdown) + "\n")
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(page.verdict)}</p>"]
    if page.warnings:
        items = "".join(f"<li>{html.escape(warning)}</li>" for warning in page.warnings)
        parts.append(f'<ul class="warnings">{items}</ul>')
    parts += [page.picture] if page.picture else []
    parts += map(html_table, page.tables)
    parts += [f"<h2>{name}</h2>\n<pre>{html.escape(text)}</pre>" for name, text in page.texts]
    write_whole(folder / "report.html", html_document(title, parts))


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


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
