"""Success on held-out scenarios before and after training, in total and per tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from offbook.base.text import one_line
from offbook.trainer.messages import SOLVED

from .training_state import Measured

_BY_TOOL = "success."


@dataclass(frozen=True)
class Comparison:
    """Measurements before and after training. `scenarios` is the scenario file's hash, `held_out` the number measured.

    no_gain: after a run without gain, why, in lines.
    """

    scenarios: str
    held_out: int
    before: Measured | None = None
    after: Measured | None = None
    no_gain: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """The table as lines, or one line if nothing was measured; then why there was no gain."""
        yield from self._table()
        yield from self.no_gain

    def _table(self) -> Iterator[str]:
        if self.before is None or self.after is None:
            yield "success was not measured: no scenario is held out"
            return
        if "success" not in self.after.rates:
            yield "success was not measured: a judge scores the held-out scenarios. Compare steps with `offbook mcp"
            yield "compare TARGET --with step:0 --with step:newest --judge MODEL`"
            return
        yield f"success on {self.held_out} held-out scenarios (greedy), scenarios {self.scenarios[:16]}"
        names = [name for name in self.after.rates if name.startswith(_BY_TOOL)]
        rows = [("all", "success"), *((one_line(name.removeprefix(_BY_TOOL), 64), name) for name in names)]
        width = max(len(label) for label, _ in rows)
        yield f"{'':{width}}  {f'step {self.before.step}':>9}  {f'step {self.after.step}':>9}"
        for label, name in rows:
            yield f"{label:{width}}  {_percent(self.before.rates.get(name)):>9}  {_percent(self.after.rates.get(name)):>9}"
        counts = [self.held_out if one.scored is None else one.scored for one in (self.before, self.after)]
        if min(counts) < self.held_out:
            yield (
                f"Rollouts failed, so step {self.before.step} was scored on {counts[0]} of the {self.held_out} scenarios and step "
                f"{self.after.step} on {counts[1]}: the columns do not compare the same ones."
            )
        if self.before.rates.get("success", 0.0) >= SOLVED:
            yield "The model solved most of these before training: harder ones leave more to learn (--scenarios FILE)."


def tool_lines(metrics: Mapping[str, float]) -> Iterator[str]:
    """The success per tool as lines, from the metrics of an evaluation."""
    names = sorted(name for name in metrics if name.startswith(_BY_TOOL))
    labels = [one_line(name.removeprefix(_BY_TOOL), 64) for name in names]
    width = max((len(label) for label in labels), default=0)
    for label, name in zip(labels, names, strict=True):
        yield f"  {label:{width}}  {_percent(metrics[name]):>4}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.0%}"
