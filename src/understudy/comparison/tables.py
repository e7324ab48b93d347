"""The tables of a comparison, as rows of text."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from understudy.trainer.statistics import Interval
from understudy.types import Json

from .results import CandidateResult, ComparisonReport, DifferingSample
from .winrates import WinRate

UNKNOWN = "unknown"
NONE = "-"
LONGEST_CELL = 300
"""Characters of a cell; longer texts are cut."""


@dataclass(frozen=True)
class Table:
    """A title, what a reader must know of the columns, and the rows."""

    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables_of(comparison: ComparisonReport) -> list[Table]:
    """Every table of the report, in its order."""
    found = [results_table(comparison)] if comparison.measure is not None else []
    found += [win_table(comparison.win_rates)] if comparison.win_rates else []
    found.append(work_table(comparison.candidates))
    found += [samples_table(comparison)] if comparison.samples else []
    found.append(settings_table(comparison))
    return found


def results_table(comparison: ComparisonReport) -> Table:
    """Success or reward with intervals, and the difference to the baseline."""
    passes = sorted({k for each in comparison.candidates for k in each.passes})
    head = ("candidate", f"{comparison.measure}, 95 % interval", f"difference to {comparison.baseline}")
    head += tuple(f"pass@{k}" for k in passes)
    head += ("reward", "rollouts", "failed") if comparison.measure == "success" else ("rollouts", "failed")
    rows: list[tuple[str, ...]] = []
    for each in comparison.candidates:
        difference = "baseline" if each.name == comparison.baseline else shown_interval(each.difference, sign="+")
        row = (each.name, shown_interval(each.value), difference, *(_number(each.passes.get(k)) for k in passes))
        row += (_number(each.reward),) if comparison.measure == "success" else ()
        rows.append((*row, str(each.rollouts), str(each.failed)))
    note = (
        "Intervals are over scenarios, by the bootstrap. The difference is taken scenario by scenario: it is real, at 95 %, where "
        "its interval leaves out 0. Failed rollouts are no zeros."
    )
    return Table("Is it better?", note, head, tuple(rows))


def win_table(rates: Sequence[WinRate]) -> Table:
    """What the judge said."""
    head = ("candidate", "wins, 95 % interval", "wins at equal length", "longer", "ties", "scenarios")
    rows = tuple(
        (
            each.candidate,
            shown_interval(each.rate),
            "cannot be told" if each.at_equal_length is None else shown_interval(each.at_equal_length),
            f"{each.longer:.0%}",
            f"{each.ties:.0%}",
            str(each.scenarios),
        )
        for each in rates
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
            each.name,
            UNKNOWN if each.cost is None else f"{1000 * each.cost:.4g}",
            f"{each.calls:.1f}",
            UNKNOWN if each.prompt_tokens is None else f"{each.prompt_tokens:,.0f}",
            UNKNOWN if each.completion_tokens is None else f"{each.completion_tokens:,.0f}",
            _two(each.latency),
            _two(each.rollout_seconds),
            NONE if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}",
        )
        for each in candidates
    )
    note = (
        "Calls and tokens are means per rollout. A trained step costs the time for which its machine was busy with these rollouts; "
        "other LLMs what their tokens cost by the price list."
    )
    return Table("What does it cost?", note, head, rows)


def samples_table(comparison: ComparisonReport) -> Table:
    """Scenarios on which candidates differ."""
    names = [each.name for each in comparison.candidates]
    rows = tuple(
        (sample.scenario, _cut(sample.text), *(_sample(sample, name) for name in names))
        for sample in comparison.samples
    )
    note = f"{comparison.measure} and last words of the first rollout; the largest differences first."
    return Table("Where candidates differ", note, ("scenario", "asked", *names), rows)


def settings_table(comparison: ComparisonReport) -> Table:
    """What produced the numbers."""
    plain: Callable[[object], str] = lambda value: value if isinstance(value, str) else json.dumps(value)  # noqa: E731
    rows = [(name, plain(value)) for name, value in comparison.settings.items() if name != "candidates"]
    prints: dict[str, Json] = comparison.settings.get("candidates") or {}
    rows += [(f"fingerprint of {name}", str(value)) for name, value in prints.items()]
    return Table("How it was made", f"Run {comparison.run}.", ("setting", "value"), tuple(rows))


def shown_interval(interval: Interval | None, sign: str = "") -> str:
    """`0.84 (0.76 to 0.91)`."""
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
