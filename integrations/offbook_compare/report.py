"""Writes the report of a comparison: Markdown, a self-contained HTML page, charts as PNG, and JSON."""

from __future__ import annotations

import base64
import html
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from offbook.base.errors import MissingExtraError
from offbook.base.text import counted
from offbook.base.types import Json
from offbook.trainer.statistics import Interval

from .charts import charts_of
from .results import CandidateResult, ComparisonReport, DifferingSample
from .winrates import WinRate

logger = logging.getLogger("offbook")

CAPTIONS = {
    "accuracy_cost": "What was achieved, against what it costs",
    "latency": "Seconds of one call",
    "tokens": "Tokens of one rollout",
}
UNKNOWN = "unknown"
NONE = "-"
LONGEST_CELL = 300
"""The most characters of a cell; longer texts are cut."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: #1d2530; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: .35rem .6rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #98a4b3; } td { border-bottom: 1px solid #dde3ea; overflow-wrap: anywhere; min-width: 4rem; }
p.note { color: #55606e; max-width: 48rem; } img { max-width: 100%; height: auto; }
ul.warnings { background: #fff6e5; border: 1px solid #f0d9a8; padding: .6rem 1rem .6rem 2rem; border-radius: 4px; }
figure { margin: 1.5rem 0; } figcaption { color: #55606e; font-size: 13px; }
svg.stages { max-width: 45rem; width: 100%; } svg.stages text { fill: currentColor; font-size: 12px; }
svg .grid { stroke: #98a4b3; stroke-opacity: .35; } svg .curve { stroke: #2563eb; stroke-width: 2; fill: none; }
svg .dot { fill: #2563eb; } svg .teacher { stroke: #c2571a; stroke-dasharray: 6 4; } svg .band { fill: #c2571a; fill-opacity: .12; }
:root { color-scheme: light dark; }
@media (prefers-color-scheme: dark) {
  body { background: #14181e; color: #dde3ea; } td { border-color: #2c3440; } p.note, figcaption { color: #9aa6b4; }
  ul.warnings { background: #33290f; border-color: #5f4d1f; } img { background: #fff; border-radius: 4px; }
  svg .curve { stroke: #7aa5ff; } svg .dot { fill: #7aa5ff; }
}
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
        parts.append(markdown_section(table))
    parts += ["Spent: " + "; ".join(comparison.spending)] if comparison.spending else []
    return "\n\n".join(parts) + "\n"


def markdown_section(table: Table) -> str:
    """A table with its title and note, in Markdown."""
    return "\n\n".join(filter(None, (f"## {table.title}", table.note, _markdown_table(table))))


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
    parts += [html_table(table) for table in tables_of(comparison)]
    parts += [f"<p class=note>Spent: {html.escape('; '.join(comparison.spending))}</p>"] if comparison.spending else []
    return html_document(title_of(comparison), parts)


def html_document(title: str, parts: Sequence[str]) -> str:
    """A self-contained page of these parts, each of them HTML."""
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n'
    )


def html_table(table: Table) -> str:
    """A table in HTML, with its title and note."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.head)
    rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f"<h2>{html.escape(table.title)}</h2>\n<p class=note>{html.escape(table.note)}</p>\n"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'
    )


@dataclass(frozen=True)
class Table:
    """A table: title, a note that explains the columns, header and rows."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables_of(comparison: ComparisonReport) -> list[Table]:
    """All tables of the report, in order."""
    tables = [results_table(comparison)] if comparison.measure is not None else []
    tables += [win_table(comparison.win_rates)] if comparison.win_rates else []
    tables.append(work_table(comparison.candidates))
    tables += [samples_table(comparison)] if comparison.samples else []
    tables.append(settings_table(comparison))
    return tables


def results_table(comparison: ComparisonReport) -> Table:
    """Success or reward with intervals, and the difference to the baseline."""
    passes = sorted({k for result in comparison.candidates for k in result.passes})
    head = ("candidate", f"{comparison.measure}, 95 % interval", f"difference to {comparison.baseline}")
    head += tuple(f"pass@{k}" for k in passes)
    head += ("reward", "rollouts", "failed") if comparison.measure == "success" else ("rollouts", "failed")
    rows: list[tuple[str, ...]] = []
    for result in comparison.candidates:
        difference = "baseline" if result.name == comparison.baseline else shown_interval(result.difference, sign="+")
        row = (result.name, shown_interval(result.value), difference, *(_number(result.passes.get(k)) for k in passes))
        row += (_number(result.reward),) if comparison.measure == "success" else ()
        rows.append((*row, str(result.rollouts), str(result.failed)))
    note = (
        "Intervals are over scenarios, by the bootstrap. The difference is taken scenario by scenario: it is real, at 95 %, where "
        "its interval leaves out 0. Failed rollouts are no zeros."
    )
    return Table("Is it better?", note, head, tuple(rows))


def win_table(rates: Sequence[WinRate]) -> Table:
    """Win rates by the judge."""
    head = ("candidate", "wins, 95 % interval", "wins at equal length", "longer", "ties", "scenarios")
    rows = tuple(
        (
            rate.candidate,
            shown_interval(rate.rate),
            "cannot be told" if rate.at_equal_length is None else shown_interval(rate.at_equal_length),
            f"{rate.longer:.0%}",
            f"{rate.ties:.0%}",
            str(rate.scenarios),
        )
        for rate in rates
    )
    note = (
        f"How often the judge preferred the candidate to {rates[0].against}, a tie counting half; it saw all candidates' rollouts of a "
        "scenario side by side, without names, in random order. 0.5 is no difference. At equal length: what is left when both write "
        "equally much; longer: the share of pairs in which the candidate wrote more."
    )
    return Table("What does the judge prefer?", note, head, rows)


def work_table(candidates: Sequence[CandidateResult]) -> Table:
    """Cost, latency, tokens and calls."""
    head = (
        "candidate",
        "USD per 1,000 rollouts",
        "calls",
        "tokens in",
        "tokens out",
        "call p50, p95 (s)",
        "rollout p50, p95 (s)",
        "tokens out per s",
    )
    rows = tuple(
        (
            result.name,
            UNKNOWN if result.cost is None else f"{1000 * result.cost:.4g}",
            f"{result.calls:.1f}",
            UNKNOWN if result.prompt_tokens is None else f"{result.prompt_tokens:,.0f}",
            UNKNOWN if result.completion_tokens is None else f"{result.completion_tokens:,.0f}",
            _two(result.latency),
            _two(result.rollout_seconds),
            NONE if result.tokens_per_second is None else f"{result.tokens_per_second:,.0f}",
        )
        for result in candidates
    )
    note = (
        "Calls and tokens are means per rollout. A trained step costs the time for which its machine was busy with these rollouts; "
        "other LLMs what their tokens cost by the price list."
    )
    return Table("What does it cost?", note, head, rows)


def samples_table(comparison: ComparisonReport) -> Table:
    """Scenarios on which candidates differ."""
    names = [candidate.name for candidate in comparison.candidates]
    rows = tuple(
        (sample.scenario, _cut(sample.text), *(_sample(sample, name) for name in names))
        for sample in comparison.samples
    )
    note = f"{comparison.measure} and last words of the first rollout; the largest differences first."
    return Table("Where candidates differ", note, ("scenario", "asked", *names), rows)


def settings_table(comparison: ComparisonReport) -> Table:
    """The settings that produced the numbers."""
    plain: Callable[[object], str] = lambda value: value if isinstance(value, str) else json.dumps(value)  # noqa: E731
    rows = [(name, plain(value)) for name, value in comparison.settings.items() if name != "candidates"]
    prints: dict[str, Json] = comparison.settings.get("candidates") or {}
    rows += [(f"fingerprint of {name}", str(value)) for name, value in prints.items()]
    return Table("How it was made", f"Run {comparison.run}.", ("setting", "value"), tuple(rows))


def shown_interval(interval: Interval | None, sign: str = "") -> str:
    """An interval as text, such as `0.840 (0.760 to 0.910)`."""
    if interval is None:
        return NONE
    return f"{interval.mean:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _two(values: tuple[float, float] | None) -> str:
    return NONE if values is None else f"{values[0]:.3g}, {values[1]:.3g}"


def _sample(sample: DifferingSample, name: str) -> str:
    value = sample.values.get(name)
    return f"{_number(value)}: {_cut(sample.answers.get(name, ''))}"


def _cut(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= LONGEST_CELL else f"{plain[:LONGEST_CELL]}..."


def result_lines(comparison: ComparisonReport, output: Path) -> list[str]:
    """The result as lines for a terminal, with the paths of the report."""
    lines: list[str] = []
    for result in comparison.candidates:
        parts = [f"{result.name}:"]
        if result.value is not None:
            parts.append(f"{comparison.measure} {shown_interval(result.value)}")
        if result.difference is not None:
            parts.append(f"difference to {comparison.baseline} {shown_interval(result.difference, sign='+')}")
        parts += [f"pass@{k} {value:.3f}" for k, value in result.passes.items()]
        parts.append("cost unknown" if result.cost is None else f"{1000 * result.cost:.4g} USD per 1,000 rollouts")
        if result.latency is not None:
            parts.append(f"call p50 {result.latency[0]:.2g} s, p95 {result.latency[1]:.2g} s")
        parts += [f"{result.failed} of {result.rollouts} failed"] if result.failed else []
        lines.append(f"{parts[0]} {', '.join(parts[1:])}")
    for rate in comparison.win_rates:
        lines.append(f"{rate.candidate}: preferred to {rate.against} {shown_interval(rate.rate)}")
    lines += [f"note: {result}" for result in comparison.warnings]
    return [*lines, *comparison.spending, f"report: {output / 'report.html'}, {output / 'report.md'}"]
