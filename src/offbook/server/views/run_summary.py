"""A run in short: its status, the trend of its rewards, and the facts and warnings at the top of its page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from offbook.base import clock
from offbook.base.alerts import AlertLimits, signs
from offbook.base.text import counted

from .dashboard_source import DashboardSource, RunOverview
from .numbers import DASH, fixed, number, percent, seconds, signed
from .run_charts import evaluations_by_split, held_out_losses, measure, saved_by_tree, score

ACTIVE_SECONDS = 180.0
"""A run that nobody ended, without a new rollout or update for this long, is shown as stopped."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run. `kind` selects a colour; `mark` and `text` express the same without colour."""

    kind: Literal["active", "done", "failed", "quiet"]
    mark: str
    text: str


def status_of(overview: RunOverview, source: DashboardSource) -> RunStatus:
    """The status of a run. Where no server runs on the directory, no run is active.

    A loop of the user's own does not say when it ends: it is stopped, as a killed trainer is.
    """
    last = overview.updates[-1] if overview.updates else None
    if source.served:
        training = source.engine.training if source.engine is not None else None
        if any(update.state == "running" or update.id == training for update in overview.updates):
            return RunStatus("active", "●", "training")
        if last is not None and last.state == "queued":
            return RunStatus("active", "○", "queued")
        if not overview.ended and abs(clock.now() - overview.last.ended_at) < ACTIVE_SECONDS:
            return RunStatus("active", "●", "active")
    if last is None:
        return RunStatus("quiet", DASH, "evaluation" if overview.is_evaluation else "not trained")
    if last.state == "failed":
        return RunStatus("failed", "✕", "failed")
    if last.state != "done":
        return RunStatus("failed", "✕", "interrupted")
    return RunStatus("done", "✓", "ended") if overview.ended else RunStatus("quiet", DASH, "stopped")


_COMPARED = 5
"""Most rewards on either side of the change."""
_LEAST_DRAWN = 3
"""Fewer rewards are no line worth drawing."""


@dataclass(frozen=True)
class Trend:
    """How the reward moved lately. `change`: the mean of the last `steps` rewards minus the mean of as many before."""

    change: float
    steps: int

    def __str__(self) -> str:
        """The trend as every page and the terminal show it.

        >>> print(Trend(0.25, 1), Trend(-0.125, 5), sep=", ")
        +0.250 in 1 step, −0.125 in 5 steps
        """
        return f"{signed(self.change, 3)} in {self.steps} step{'s' * (self.steps != 1)}"


def trend(rewards: Sequence[float]) -> Trend | None:
    """The trend of the mean rewards of a run's steps, oldest first. It compares at most five with the five before; None
    for fewer than two rewards.

    >>> trend([0.0, 0.5, 1.0, 1.5])
    Trend(change=1.0, steps=2)
    """
    steps = min(_COMPARED, len(rewards) // 2)
    if not steps:
        return None
    return Trend(sum(rewards[-steps:]) / steps - sum(rewards[-2 * steps : -steps]) / steps, steps)


def points(values: Sequence[float], width: float, height: float, margin: float = 2.0) -> str:
    """The points of a line through the values, scaled to a box; "" for fewer than three values.

    Equal values lie in the middle of the box.

    >>> points([0.0, 0.5, 1.0], width=24, height=14)
    '2.0,12.0 12.0,7.0 22.0,2.0'
    """
    if len(values) < _LEAST_DRAWN:
        return ""
    low, high = min(values), max(values)
    inner = height - 2 * margin
    across = (width - 2 * margin) / (len(values) - 1)

    def y(value: float) -> float:
        return margin + inner * (0.5 if high == low else 1 - (value - low) / (high - low))

    return " ".join(f"{margin + across * index:.1f},{y(value):.1f}" for index, value in enumerate(values))


_LOOKED_BACK = 10
"""Number of last updates whose warnings are shown."""


@dataclass(frozen=True)
class Fact:
    """A named value. `note` is shown in small print under it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class RunWarning:
    """A warning of an update. A warning that several updates have in common is shown once, for the last of them."""

    step: int | None  # step of the model after the update
    from_step: int | None  # step that sampled the rollouts
    text: str
    times: int = 1  # number of updates with this warning


def facts_of(overview: RunOverview) -> list[Fact]:
    """Step, reward or cross-entropy, evaluation, entropy, clipped tokens, sampler lag, tokens saved by the tree, and seconds per step."""
    done = [update for update in overview.updates if update.state == "done"]
    metrics = done[-1].metrics if done else {}
    steps = [update.result_step for update in done if update.result_step is not None]
    evaluations = overview.evaluations
    by_split = evaluations_by_split(held_out_losses(evaluations) if overview.loss is not None else evaluations)
    scored = by_split.get("val") or next(iter(by_split.values()), None)
    times = [later.created_at - earlier.created_at for earlier, later in pairwise(done[-6:])]
    saved = saved_by_tree(done[-1]) if done else None
    return [
        Fact(
            "Step",
            number(max(steps) if steps else overview.last.step),
            "evaluated" if overview.is_evaluation else counted(len(done), "update"),
        ),
        _outcome(overview),
        Fact(
            "Evaluation",
            fixed(score(scored[-1]), 3) if scored else DASH,
            f"{measured(measure(scored[-1]))} at step {scored[-1].step}" if scored else "none",
        ),
        Fact("Entropy", number(metrics.get("entropy")), "nats per token"),
        Fact("Clipped", percent(metrics.get("clip_fraction"), 1), "of trained tokens"),
        Fact("Sampler lag", number(metrics.get("calls/staleness_mean")), "steps, on average"),
        Fact("Tree saves", percent(saved), "of the tokens"),
        Fact("A step takes", seconds(sum(times) / len(times)) if times else DASH, "mean of the last"),
    ]


def _outcome(overview: RunOverview) -> Fact:
    """The reward of a run, or its cross-entropy if the last update is supervised."""
    if overview.loss is not None:
        return Fact("Cross-entropy", fixed(overview.loss, 3), str(trend(overview.losses) or "nats per token"))
    without_trend = "mean over scenarios" if overview.is_evaluation else "mean of the newest rollouts"
    return Fact("Reward", fixed(overview.reward, 3), str(trend(overview.rewards) or without_trend))


def measured(name: str) -> str:
    """What an evaluation measured, as words.

    >>> measured("cross_entropy")
    'cross-entropy'
    """
    return name.replace("_", "-")


def warnings_of(overview: RunOverview, limits: AlertLimits | None = None) -> list[RunWarning]:
    """Alerts, warnings and errors of the last updates, newest first. `limits` defaults to those of the alerts."""
    updates = overview.updates[-_LOOKED_BACK:]
    history = [update.metrics for update in overview.updates]
    warnings: list[RunWarning] = []
    for index, update in enumerate(updates, start=len(overview.updates) - len(updates)):
        watched = bool(update.metrics) and not update.supervised  # its examples are not the policy's answers
        texts = [sign.message for sign in signs(history[: index + 1], limits or AlertLimits())] if watched else []
        texts += update.warnings
        if update.state == "failed" or (update.state == "interrupted" and update is overview.updates[-1]):
            texts.append(f"train request {update.state}: {update.why}")
        elif update.state == "done" and not update.applied:
            texts.append(f"nothing was learned: {update.why}")
        warnings += [RunWarning(update.result_step, update.step, text) for text in texts]
    return _once(list(reversed(warnings)))


def _once(warnings: Sequence[RunWarning]) -> list[RunWarning]:
    """Keep the first warning of each text. Texts that differ only in digits count as equal."""
    unique: dict[str, RunWarning] = {}
    for warning in warnings:
        kind = "".join(letter for letter in warning.text if not letter.isdigit())
        first = unique.get(kind)
        unique[kind] = (
            warning if first is None else RunWarning(first.step, first.from_step, first.text, first.times + 1)
        )
    return list(unique.values())
