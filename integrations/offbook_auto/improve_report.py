"""The report of an improvement: the curve of its stages, and the comparison with the teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbook.llms.ledger import SpendingTotals
from offbook_compare.report import Table, shown_interval, tables_of
from offbook_compare.results import CandidateResult, ComparisonReport

from .pages import spending_table, write_page

SUPERVISED = "supervised"
"""The stage of the curve whose step the supervised training made."""


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


def own_points(curve: Sequence[CurvePoint], fork: str) -> list[CurvePoint]:
    """The points of the model that the rounds trained. The supervised step is none of a fork's; both have the same base."""
    return [point for point in curve if not (fork and point.stage == SUPERVISED)]


@dataclass(frozen=True)
class ImproveReport:
    """The result of `Improver.run`. `reached`: the last whole stage; `stopped`: "budget" where `max_cost` ended the run.
    `ended`: why the rounds ended. `curve`: the base, and the step after each stage. `fork`: the model of the rounds, if they
    began at the base again."""

    folder: Path
    model: str
    base_model: str
    teacher: str
    reached: str
    stopped: str
    good: str
    ended: str
    seconds: Mapping[str, float]
    curve: Sequence[CurvePoint]
    comparison: ComparisonReport | None
    spending: Mapping[str, SpendingTotals]
    fork: str = ""

    @property
    def best(self) -> CurvePoint | None:
        """The measured step with the highest value, the earliest of several."""
        return best_of(own_points(self.curve, self.fork))

    @property
    def compared(self) -> CandidateResult | None:
        """The teacher's result; None before the comparison."""
        results = () if self.comparison is None else self.comparison.candidates
        return next((result for result in results if result.name == self.teacher), None)

    def verdict(self) -> str:
        """What came of it, in a few sentences."""
        best, teacher = self.best, self.compared
        if best is None or self.comparison is None:
            return f"nothing was measured yet: {self._why()}; the last whole stage is {self.reached or 'none'}"
        parts = [
            f"step {best.step} of {self.model}: {self.comparison.measure} {shown_interval(best.result.value)} held out"
        ]
        if best.step and best.result.difference is not None:
            parts.append(f"difference to its base {shown_interval(best.result.difference, sign='+')}")
        elif not best.step:
            parts.append("no stage was better than the base")
        if teacher is None:
            return f"{'; '.join(parts)}. Not compared with the teacher: {self._why()}"
        parts.append(f"the teacher {teacher.name} {shown_interval(teacher.value)}")
        if teacher.latency is not None and best.result.latency is not None:
            parts.append(
                f"a call takes {best.result.latency[0]:.2g} s, the teacher's {teacher.latency[0]:.2g} s (median)"
            )
        costs = [_price(result) for result in (best.result, teacher)]
        return f"{'; '.join([*parts, f'1,000 runs cost {costs[0]}, the teacher {costs[1]}'])}."

    def _why(self) -> str:
        return "max_cost is spent" if self.stopped else "it was not asked for"

    def warnings(self) -> list[str]:
        """What limits the numbers."""
        told = list(self.comparison.warnings) if self.comparison is not None else []
        if len(self.curve) > 2:
            told.append(
                f"the step was chosen among {len(self.curve)} on these held-out scenarios, which makes its number a little too "
                "high: measure it on others for a claim"
            )
        return told

    def lines(self) -> list[str]:
        """The result as lines for a terminal."""
        spent = [totals.line(purpose) for purpose, totals in self.spending.items()]
        best = self.best
        use = [f"use it: {self.model}, step {best.step}"] if best is not None and best.step else []
        pages = f"report: {self.folder / 'report.md'}"
        return ["", self.verdict(), *(f"note: {line}" for line in self.warnings()), *spent, *use, pages]


def write_report(report: ImproveReport, folder: Path) -> None:
    """Write report.md. Raises ConfigError."""
    tables = [curve_table(report)] if report.curve else []
    tables += [] if report.comparison is None else tables_of(report.comparison)
    tables.append(spending_table(report.spending, report.folder))
    write_page(folder, f"{report.model}, in place of {report.teacher}", report.verdict(), tables, report.warnings())


def curve_table(report: ImproveReport) -> Table:
    """The held-out result after each stage."""
    measure = (report.comparison.measure if report.comparison is not None else None) or "success"
    head = ("after", "step", f"held-out {measure}, 95 % interval", "difference to the base", "minutes")
    took = {SUPERVISED: "sft"}
    rows = tuple(
        (
            point.stage,
            str(point.step),
            shown_interval(point.result.value),
            shown_interval(point.result.difference, sign="+"),
            _minutes(report.seconds.get(took.get(point.stage, point.stage))),
        )
        for point in report.curve
    )
    told = [f"Observed: {report.good}."] if report.good else []
    told += (
        [f"The base did better than the supervised step, so the rounds trained {report.fork} from the base."]
        if report.fork
        else []
    )
    told += [f"The rounds ended: {report.ended}."] if report.ended else []
    return Table("What did each stage give?", " ".join(told), head, rows)


def _price(result: CandidateResult) -> str:
    return "an unknown price" if result.cost is None else f"{1000 * result.cost:.4g} USD"


def _minutes(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 60:.1f}"
