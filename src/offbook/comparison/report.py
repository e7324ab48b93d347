"""Writes the report of a comparison: Markdown, a self-contained HTML page, charts as PNG, and JSON."""

from __future__ import annotations

import base64
import html
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from offbook.base.errors import MissingExtraError
from offbook.base.text import counted

from .charts import charts_of
from .results import ComparisonReport
from .tables import Table, tables_of

logger = logging.getLogger("offbook")

CAPTIONS = {
    "accuracy_cost": "What was achieved, against what it costs",
    "latency": "Seconds of one call",
    "tokens": "Tokens of one rollout",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: #1d2530; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: .35rem .6rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #98a4b3; } td { border-bottom: 1px solid #dde3ea; overflow-wrap: anywhere; min-width: 4rem; }
p.note { color: #55606e; max-width: 48rem; } img { max-width: 100%; height: auto; }
ul.warnings { background: #fff6e5; border: 1px solid #f0d9a8; padding: .6rem 1rem .6rem 2rem; border-radius: 4px; }
"""


def write_report(comparison: ComparisonReport, folder: Path) -> None:
    """Write report.md, report.html, comparison.json and the charts. Without matplotlib, logs that there are no charts."""
    try:
        charts = charts_of(comparison)
    except MissingExtraError as error:
        logger.warning("the report has no charts: %s", error)
        charts = {}
    for name, content in charts.items():
        (folder / f"{name}.png").write_bytes(content)
    (folder / "report.md").write_text(markdown(comparison, list(charts)), encoding="utf-8")
    (folder / "report.html").write_text(page(comparison, charts), encoding="utf-8")
    (folder / "comparison.json").write_text(json.dumps(asdict(comparison), indent=1) + "\n", encoding="utf-8")


def title_of(comparison: ComparisonReport) -> str:
    """The report's title."""
    first = comparison.candidates[0]
    return f"{counted(len(comparison.candidates), 'candidate')} on {counted(first.scenarios, 'scenario')}"


def markdown(comparison: ComparisonReport, charts: Sequence[str]) -> str:
    """The report as Markdown, for a repository or an issue."""
    parts = [f"# {title_of(comparison)}"]
    parts += ["\n".join(f"- {warning}" for warning in comparison.warnings)] if comparison.warnings else []
    parts += [f"![{CAPTIONS[name]}]({name}.png)" for name in charts]
    for table in tables_of(comparison):
        parts.append(f"## {table.title}\n\n{table.note}\n\n{_markdown_table(table)}")
    parts += ["Spent: " + "; ".join(comparison.spending)] if comparison.spending else []
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    lines = [table.head, ("---",) * len(table.head), *table.rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|")


def page(comparison: ComparisonReport, charts: Mapping[str, bytes]) -> str:
    """The report as one self-contained HTML page."""
    parts = [f"<h1>{html.escape(title_of(comparison))}</h1>"]
    if comparison.warnings:
        items = "".join(f"<li>{html.escape(warning)}</li>" for warning in comparison.warnings)
        parts.append(f'<ul class="warnings">{items}</ul>')
    for name, content in charts.items():
        source = base64.b64encode(content).decode()
        parts.append(f'<p><img alt="{html.escape(CAPTIONS[name])}" src="data:image/png;base64,{source}"></p>')
    parts += [_html_table(table) for table in tables_of(comparison)]
    parts += [f"<p class=note>Spent: {html.escape('; '.join(comparison.spending))}</p>"] if comparison.spending else []
    title = html.escape(title_of(comparison))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.head)
    rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f"<h2>{html.escape(table.title)}</h2>\n<p class=note>{html.escape(table.note)}</p>\n"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
    )
