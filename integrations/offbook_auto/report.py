"""The report of a training from a description: Markdown, and one self-contained HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbook.base.text import counted
from offbook.llms.ledger import SpendingTotals
from offbook.trainer.report import TrainReport
from offbook_compare.report import Table, shown_interval, tables_of
from offbook_compare.results import CandidateResult, ComparisonReport

from .inputs import TaskInput
from .pages import spending_table, write_page


@dataclass(frozen=True)
class AutoReport:
    """The result of `AutoTrainer.run`. `reached`: the last stage that is whole; `stopped`: "budget" where `max_cost` ended
    the run. `spending` covers all runs with this folder, by purpose."""

    folder: Path
    description: str
    model: str | None
    base_model: str
    reached: str
    stopped: str
    inputs: tuple[TaskInput, ...]
    prompt: str
    rubric: str
    training: TrainReport | None
    comparison: ComparisonReport | None
    spending: Mapping[str, SpendingTotals]

    @property
    def trained(self) -> CandidateResult | None:
        """The trained step on the held-out inputs, compared with the base; None before the comparison."""
        return None if self.comparison is None else self.comparison.candidates[-1]

    @property
    def improved(self) -> bool | None:
        """Whether the held-out score rose with 95 % confidence; None before the comparison."""
        difference = None if self.trained is None else self.trained.difference
        return None if difference is None else difference.low > 0

    def verdict(self) -> str:
        """What came of it, in one line."""
        if self.comparison is None or self.trained is None:
            why = "max_cost is spent" if self.stopped else "the comparison has not run"
            return f"not compared: {why}; the last whole stage is {self.reached or 'none'}"
        told = {True: "better than its base", False: "not shown to be better than its base", None: "not comparable"}
        return (
            f"{told[self.improved]} on {counted(self.trained.scenarios, 'held-out input')}: {self.comparison.measure} "
            f"{shown_interval(self.trained.value)}, difference {shown_interval(self.trained.difference, sign='+')}"
        )

    def lines(self) -> list[str]:
        """The result as lines for a terminal."""
        spent = [totals.line(purpose) for purpose, totals in self.spending.items()]
        return [
            f"{self.model or 'model'}: {self.verdict()}",
            *spent,
            f"report: {self.folder / 'report.md'}",
        ]


def write_report(report: AutoReport, folder: Path) -> None:
    """Write report.md. Raises ConfigError."""
    tables = [facts_table(report), *([] if report.comparison is None else tables_of(report.comparison))]
    tables.append(spending_table(report.spending, report.folder))
    write_page(folder, report.description, report.verdict(), tables, prompt=report.prompt, rubric=report.rubric)


def facts_table(report: AutoReport) -> Table:
    """What was made of what."""
    splits = Counter(one.split for one in report.inputs)
    spread = Counter(one.difficulty for one in report.inputs if one.difficulty is not None)
    rows = [("model", report.model or "none yet"), ("base", report.base_model)]
    if report.training is not None:
        rows += [("step", str(report.training.step)), ("LoRA", report.training.checkpoint or "none")]
        rows += _rewards(report.training.rewards)
    rows.append(("inputs", ", ".join(f"{count} {split}" for split, count in splits.items()) or "none yet"))
    if spread:
        rows.append(("difficulty", ", ".join(f"{spread[level]} of {level}" for level in sorted(spread))))
    return Table("What was trained", "", ("", ""), tuple(rows))


def _rewards(rewards: Sequence[float]) -> list[tuple[str, str]]:
    if not rewards:
        return []
    shown = f"{rewards[0]:.3f} in the first step of this run, {rewards[-1]:.3f} in the last"
    return [("mean score in training", f"{shown}; the judge compares answers to one input, so it need not rise")]
