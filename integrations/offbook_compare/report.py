"""Writes the report of a comparison: Markdown and JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from offbook.base.text import counted
from offbook.trainer.evaluate import Interval

from .judging import WinRate
from .results import CandidateResult, ComparisonReport, DifferingSample

UNKNOWN = "unknown"
NONE = "-"
LONGEST_CELL = 300
"""The most characters of a cell; longer texts are cut."""


def write_report(comparison: ComparisonReport, folder: Path) -> None:
    """Write report.md and comparison.json."""
    (folder / "report.md").write_text(markdown(comparison), encoding="utf-8")
    (folder / "comparison.json").write_text(json.dumps(asdict(comparison), indent=1) + "\n", encoding="utf-8")


def markdown(comparison: ComparisonReport) -> str:
    """The report as Markdown, for a repository or an issue."""
    count = counted(comparison.candidates[0].scenarios, "scenario")
    parts = [f"# {counted(len(comparison.candidates), 'candidate')} on {count}"]
    parts += ["\n".join(f"- {warning}" for warning in comparison.warnings)] if comparison.warnings else []
    parts += map(markdown_section, tables_of(comparison))
    parts += ["Spent: " + "; ".join(comparison.spending)] if comparison.spending else []
    parts.append(f"Run {comparison.run}. Its settings are in comparison.json.")
    return "\n\n".join(parts) + "\n"


def markdown_section(table: Table) -> str:
    """A table with its title and note, in Markdown."""

    def cell(text: str) -> str:
        return html.escape(text, quote=False).replace("|", "\\|")

    lines = [table.head, ("---",) * len(table.head), *table.rows]
    rows = "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)
    return "\n\n".join(filter(None, (f"## {table.title}", table.note, rows)))


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
    head = ("candidate", "wins, 95 % interval", "longer", "ties", "scenarios")
    rows = tuple(
        (
            rate.candidate,
            shown_interval(rate.rate),
            f"{rate.longer:.0%}",
            f"{rate.ties:.0%}",
            str(rate.scenarios),
        )
        for rate in rates
    )
    note = (
        f"How often the judge preferred the candidate to {rates[0].against}, a tie counting half; it saw all candidates' rollouts of a "
        "scenario side by side, without names, in random order. 0.5 is no difference. Longer: the share of pairs in which the "
        "candidate wrote more; judges like long answers."
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
    )
    rows = tuple(
        (
            result.name,
            UNKNOWN if result.cost is None else f"{1000 * result.cost:.4g}",
            f"{result.calls:.1f}",
            UNKNOWN if result.prompt_tokens is None else f"{result.prompt_tokens:,.0f}",
            UNKNOWN if result.completion_tokens is None else f"{result.completion_tokens:,.0f}",
            NONE if result.latency is None else f"{result.latency[0]:.3g}, {result.latency[1]:.3g}",
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


def shown_interval(interval: Interval | None, sign: str = "") -> str:
    """An interval as text, such as `0.840 (0.760 to 0.910)`."""
    if interval is None:
        return NONE
    return f"{interval.mean:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def _sample(sample: DifferingSample, name: str) -> str:
    value = sample.values.get(name)
    return f"{_number(value)}: {_cut(sample.answers.get(name, ''))}"


def _cut(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= LONGEST_CELL else f"{plain[:LONGEST_CELL]}..."


def candidate_line(comparison: ComparisonReport, result: CandidateResult) -> str:
    """A candidate's result as a line for a terminal."""
    parts = [] if result.value is None else [f"{comparison.measure} {shown_interval(result.value)}"]
    if result.difference is not None:
        parts.append(f"difference to {comparison.baseline} {shown_interval(result.difference, sign='+')}")
    parts += [f"pass@{k} {value:.3f}" for k, value in result.passes.items()]
    parts.append("cost unknown" if result.cost is None else f"{1000 * result.cost:.4g} USD per 1,000 rollouts")
    if result.latency is not None:
        parts.append(f"call p50 {result.latency[0]:.2g} s, p95 {result.latency[1]:.2g} s")
    parts += [f"{result.failed} of {result.rollouts} failed"] if result.failed else []
    return f"{result.name}: {', '.join(parts)}"


def result_lines(comparison: ComparisonReport, output: Path) -> list[str]:
    """The result as lines for a terminal, with the paths of the report."""
    lines = [candidate_line(comparison, result) for result in comparison.candidates]
    for rate in comparison.win_rates:
        lines.append(f"{rate.candidate}: preferred to {rate.against} {shown_interval(rate.rate)}")
    lines += [f"note: {result}" for result in comparison.warnings]
    return [*lines, *comparison.spending, f"report: {output / 'report.md'}"]
