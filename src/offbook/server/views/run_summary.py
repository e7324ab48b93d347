"""A run in short: its status and trend, the facts and warnings at the top of its page, and the rows of the tables of runs,
steps and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from offbook.base import clock
from offbook.base.alerts import AlertLimits, signs, taught_share
from offbook.base.text import counted
from offbook.server.records.overview import RunRow

from .numbers import DASH, fixed, number, percent, seconds, signed
from .run_index import (
    CROSS_ENTROPY,
    TrainUpdate,
    evaluations_by_split,
    held_out_losses,
    measure,
    saved_by_tree,
    score,
)
from .run_source import RunOverview, RunSource

ACTIVE_SECONDS = 180.0
"""A run that nobody ended, without a new rollout or update for this long, is shown as stopped."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a run. `kind` selects a colour; `mark` and `text` express the same without colour."""

    kind: Literal["active", "done", "failed", "quiet"]
    mark: str
    text: str


def status_of(overview: RunOverview, source: RunSource) -> RunStatus:
    """The status of a run. Where no server runs on the directory, no run is active.

    A loop of the user's own does not say when it ends: it is stopped, as a killed trainer is.
    """
    last = overview.updates[-1] if overview.updates else None
    if source.served:
        if any(update.state == "running" or update.id == source.training for update in overview.updates):
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


_OF_REWARDS: dict[str, Callable[[TrainUpdate], str]] = {
    "Reward": lambda update: fixed(update.reward, 3),
    "Spread": lambda update: DASH if update.supervised else fixed(update.metrics.get("reward/std"), 3),
}
_OF_EXAMPLES: dict[str, Callable[[TrainUpdate], str]] = {
    "Cross-entropy": lambda update: fixed(update.cross_entropy, 3),
}
_OF_ALL: dict[str, Callable[[TrainUpdate], str]] = {
    "Groups trained": lambda u: f"{number(u.metrics.get('groups/trained'))} of {number(u.metrics.get('groups/total'))}",
    "Taught": lambda update: DASH if update.supervised else percent(taught_share(update.metrics)),
    "Trained tokens": lambda update: number(update.metrics.get("tokens/trained")),
    "Tree saves": lambda update: percent(saved_by_tree(update)),
    "Clipped": lambda update: percent(update.metrics.get("clip_fraction"), 1),
    "Entropy": lambda update: number(update.metrics.get("entropy")),
    "KL": lambda update: number(update.metrics.get("kl/sampler_learner")),
    "Seconds": lambda update: seconds(update.metrics.get("seconds/total")),
}
STEPS_SHOWN = 50
"""Steps on one page of the table."""


@dataclass(frozen=True)
class RunLine:
    """A row of the table of runs.

    `reward`: the mean of the last step, or of an evaluation. `loss`: instead of it the cross-entropy per token, if the last
    update is supervised. `change`: its trend as text."""

    run: str | None
    status: RunStatus
    models: str
    step: int | None
    rollouts: int
    reward: float | None
    loss: float | None
    change: str
    evaluation: float | None
    measure: str
    evaluated_at: int | None
    began: float


@dataclass(frozen=True)
class StepLine:
    """A row of the table of steps: an update with its numbers as text. `from_step` is the step whose rollouts it learned from."""

    step: str
    from_step: int | None
    cells: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class EvaluationLine:
    """A row of the table of evaluations. `success` and `reward` are
    means over scenarios once the evaluation has ended, before that `reward` is the mean of its rollouts. `loss`: the
    cross-entropy per token of held-out examples, nats. `sampled`: whether rollouts of the step are in the records."""

    step: int | None
    split: str | None
    success: float | None
    reward: float | None
    rollouts: int
    failed: int
    loss: float | None = None
    sampled: bool = True


def run_name(run: str | None) -> str:
    """The title of a run."""
    return "Rollouts without a run" if run is None else run


async def lines_of(rows: Sequence[RunRow], source: RunSource) -> list[RunLine]:
    """The rows of runs."""
    return [line_of(overview, source) for overview in await source.overviews(rows)]


def line_of(overview: RunOverview, source: RunSource) -> RunLine:
    """The row of a run."""
    values = overview.rewards if overview.loss is None else overview.losses
    last = next((evaluation for evaluation in reversed(overview.evaluations) if score(evaluation) is not None), None)
    steps = [update.result_step for update in overview.updates if update.result_step is not None]
    change = trend(values)
    return RunLine(
        run=overview.run,
        status=status_of(overview, source),
        models=", ".join(overview.models),
        step=max(steps) if steps else overview.last.step,
        rollouts=overview.row.rollouts,
        reward=overview.reward if overview.loss is None else None,
        loss=overview.loss,
        change="" if change is None else str(change),
        evaluation=score(last) if last is not None else None,
        measure=measured(measure(last)) if last is not None else "",
        evaluated_at=last.step if last is not None else None,
        began=overview.first.started_at,
    )


async def evaluation_lines(run: RunOverview, source: RunSource) -> list[EvaluationLine]:
    """The evaluations inside a run, newest step first."""
    lines: list[EvaluationLine] = []
    logged = {(entry.split, entry.step): entry for entry in run.evaluations}
    for row in await source.steps(run.run):
        if row.split == "train":
            continue
        entry = logged.pop((row.split or "", row.step), None)
        reward = entry.value("reward") if entry is not None else None
        lines.append(
            EvaluationLine(
                *(row.step, row.split, entry.value("success") if entry is not None else None),
                *(row.reward if reward is None else reward, row.rollouts, row.failed),
                loss=entry.value(CROSS_ENTROPY) if entry is not None else None,
            )
        )
    # Held-out examples are recorded once, at the step that was measured first.
    lines += [
        EvaluationLine(step, split, None, None, entry.rollouts, 0, loss=loss, sampled=False)
        for (split, step), entry in logged.items()
        if (loss := entry.value(CROSS_ENTROPY)) is not None
    ]
    return sorted(lines, key=lambda line: -1 if line.step is None else line.step, reverse=True)


def step_table(overview: RunOverview) -> tuple[tuple[str, ...], list[StepLine]]:
    """The headings of a run's table of steps, and one row per update, newest first."""
    supervised = {update.supervised for update in overview.updates}
    columns = (_OF_EXAMPLES if True in supervised else {}) | (_OF_REWARDS if False in supervised else {}) | _OF_ALL
    return tuple(columns), [_line(update, columns) for update in reversed(overview.updates)]


def _line(update: TrainUpdate, columns: dict[str, Callable[[TrainUpdate], str]]) -> StepLine:
    step = number(update.result_step) if update.result_step is not None else f"from {number(update.step)}"
    state = "" if update.applied else "nothing learned" if update.state == "done" else update.state
    return StepLine(step, update.step, tuple(cell(update) for cell in columns.values()), state)
