"""The report of a training: what was trained, what each stage gave, the comparison, and what was spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offbook.llms.ledger import SpendingTotals
from offbook.trainer.report import TrainReport
from offbook_compare.report import Table, markdown_section, shown_interval, tables_of
from offbook_compare.results import CandidateResult, ComparisonReport

from .task import write_whole


@dataclass(frozen=True)
class CurvePoint:
    """A step after a stage, as the held-out scenarios measured it; its difference is to the base."""

    stage: str
    step: int
    result: CandidateResult

    @property
    def mean(self) -> float:
        """The measured value; below all others if nothing was scored."""
        return float("-inf") if self.result.value is None else self.result.value.mean


def best_of(curve: Sequence[CurvePoint]) -> CurvePoint | None:
    """The measured point with the highest value, the earliest of several; None before the first."""
    measured = [point for point in curve if point.result.value is not None]
    return max(measured, key=lambda point: point.mean, default=None)


@dataclass(kw_only=True)
class ImproveReport:
    """What the stages have made so far, and the result of `Improver.run`.

    `sft`, `rounds`: the step after the supervised training, and after each round; `ended`: why no further round follows;
    `good`: the good runs, in words. `curve`: the base, and the step after each stage. `training`: of a run without a teacher.
    `reached`: the last whole stage, "" for none; `stopped`: "budget" where `max_cost` ended the run. `spending` covers all
    runs with the folder, by purpose."""

    folder: Path
    model: str
    teacher: str = ""
    sft: int | None = None
    rounds: list[int] = field(default_factory=list[int])
    ended: str = ""
    good: str = ""
    curve: list[CurvePoint] = field(default_factory=list[CurvePoint])
    comparison: ComparisonReport | None = None
    training: TrainReport | None = None
    reached: str = ""
    stopped: str = ""
    spending: Mapping[str, SpendingTotals] = field(default_factory=dict[str, SpendingTotals])
    texts: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def best(self) -> CurvePoint | None:
        """The measured step with the highest value, the earliest of several."""
        return best_of(self.curve)

    @property
    def measure(self) -> str:
        """What the held-out scenarios measure."""
        return (self.comparison.measure if self.comparison is not None else None) or "success"

    @property
    def improved(self) -> bool | None:
        """Whether the best step is better than the base with 95 % confidence; None before the comparison."""
        difference = None if self.best is None else self.best.result.difference
        return difference.low > 0 if difference is not None else None if self.best is None else False

    @property
    def compared(self) -> CandidateResult | None:
        """The teacher's result; None before the comparison."""
        results = () if self.comparison is None else self.comparison.candidates
        return next((result for result in results if result.name == self.teacher), None)

    def verdict(self) -> str:
        """What came of it, in a few sentences."""
        best, teacher = self.best, self.compared
        why = "max_cost is spent" if self.stopped else "it was not asked for"
        if best is None or self.comparison is None:
            return f"nothing was measured yet: {why}; the last whole stage is {self.reached or 'none'}"
        parts = [
            f"step {best.step} of {self.model}: {self.comparison.measure} {shown_interval(best.result.value)} held out"
        ]
        if best.step and best.result.difference is not None:
            parts.append(f"difference to its base {shown_interval(best.result.difference, sign='+')}")
        elif not best.step:
            parts.append("no stage was better than the base")
        if teacher is None:
            return "; ".join(parts) + (f". Not compared with the teacher: {why}" if self.teacher else "")
        parts.append(f"the teacher {teacher.name} {shown_interval(teacher.value)}")
        if teacher.latency is not None and best.result.latency is not None:
            parts.append(
                f"a call takes {best.result.latency[0]:.2g} s, the teacher's {teacher.latency[0]:.2g} s (median)"
            )
        costs = [
            "an unknown price" if result.cost is None else f"{1000 * result.cost:.4g} USD"
            for result in (best.result, teacher)
        ]
        return f"{'; '.join([*parts, f'1,000 runs cost {costs[0]}, the teacher {costs[1]}'])}."

    def warnings(self) -> list[str]:
        """What limits the numbers."""
        warnings = list(self.comparison.warnings) if self.comparison is not None else []
        if len(self.curve) > 2:
            warnings.append(
                f"the step was chosen among {len(self.curve)} on these held-out scenarios, which makes its number a little too "
                "high: measure it on others for a claim"
            )
        return warnings

    def lines(self) -> list[str]:
        """The result as lines for a terminal."""
        spent = [totals.line(purpose) for purpose, totals in self.spending.items()]
        best = self.best
        use = [f"use it: {self.model}, step {best.step}"] if best is not None and best.step else []
        page = f"report: {self.folder / 'report.md'}"
        return ["", self.verdict(), *(f"note: {line}" for line in self.warnings()), *spent, *use, page]


def write_report(report: ImproveReport) -> None:
    """Write report.md to its folder. Raises ConfigError."""
    title = f"{report.model}, in place of {report.teacher}" if report.teacher else report.model
    warnings = "\n".join(f"- {warning}" for warning in report.warnings())
    tables = [curve_table(report)] if report.curve else []
    tables += [] if report.comparison is None else tables_of(report.comparison)
    parts = [f"# {title}", report.verdict(), warnings, *map(markdown_section, tables)]
    spent = [f"- {totals.line(purpose)}" for purpose, totals in report.spending.items()]
    parts.append(
        "\n".join(["## What did it take?\n\nQuestions to other LLMs, in all runs with this folder.\n", *spent])
    )
    for name, text in report.texts.items():
        parts.append(f"## {name.capitalize()}\n\n" + "\n".join(f"    {line}" for line in text.splitlines()))
    write_whole(report.folder / "report.md", "\n\n".join(filter(None, parts)) + "\n")


def curve_table(report: ImproveReport) -> Table:
    """The held-out result after each stage."""
    head = ("after", "step", f"held-out {report.measure}, 95 % interval", "difference to the base")
    rows: list[tuple[str, ...]] = []
    for point in report.curve:
        difference = shown_interval(point.result.difference, sign="+")
        rows.append((point.stage, str(point.step), shown_interval(point.result.value), difference))
    notes = [f"Observed: {report.good}."] if report.good else []
    notes += [f"The rounds ended: {report.ended}."] if report.ended else []
    return Table("What did each stage give?", " ".join(notes), head, tuple(rows))
