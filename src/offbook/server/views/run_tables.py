"""The rows of the tables of runs, steps and evaluations, for pages and the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offbook.base.alerts import taught_share

from .dashboard_source import DashboardSource, RunOverview
from .numbers import DASH, fixed, number, percent, seconds
from .page_urls import step_url
from .run_charts import measure, saved_by_tree, score
from .run_index import CROSS_ENTROPY, ListedRun, TrainUpdate
from .run_summary import RunStatus, measured, points, status_of, trend

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
_EVALUATIONS_SHOWN = 5  # under one training; its page has all of them
_DRAWN = 60  # rewards in a sparkline


@dataclass(frozen=True)
class RunLine:
    """A row of the table of runs.

    `reward`: the mean of the last step, or of an evaluation. `loss`: instead of it the cross-entropy per token, if the last
    update is supervised. `change`: its trend as text. `drawn`: the points of an SVG polyline of the last values. `evaluations`: those that belong to it, newest first; `left_out` counts older ones."""

    run: str | None
    status: RunStatus
    models: str
    step: int | None
    rollouts: int
    reward: float | None
    loss: float | None
    change: str
    drawn: str
    evaluation: float | None
    measure: str
    evaluated_at: int | None
    began: float
    evaluations: tuple[RunLine, ...] = ()
    left_out: int = 0


@dataclass(frozen=True)
class StepLine:
    """A row of the table of steps: an update with its numbers as text. `url` is the page of the step that it learned from."""

    step: str
    url: str
    cells: tuple[str, ...]
    state: str


@dataclass(frozen=True)
class EvaluationLine:
    """A row of the table of evaluations. `run` is a run of its own, or the training itself. `success` and `reward` are
    means over scenarios once the evaluation has ended, before that `reward` is the mean of its rollouts. `loss`: the
    cross-entropy per token of held-out examples, nats. `sampled`: whether rollouts of the step are in the records."""

    run: str | None
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


async def lines_of(listed: Sequence[ListedRun], source: DashboardSource) -> list[RunLine]:
    """The rows of runs, each with the newest evaluations that belong to it."""
    shown = [row for item in listed for row in (item.row, *item.evaluations[:_EVALUATIONS_SHOWN])]
    lines = {overview.run: line_of(overview, source) for overview in await source.overviews(shown)}
    return [
        replace(
            lines[item.row.run],
            evaluations=tuple(lines[row.run] for row in item.evaluations[:_EVALUATIONS_SHOWN]),
            left_out=len(item.evaluations[_EVALUATIONS_SHOWN:]),
        )
        for item in listed
    ]


def line_of(overview: RunOverview, source: DashboardSource) -> RunLine:
    """The row of a run, without those that belong to it."""
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
        drawn=points(values[-_DRAWN:], 96, 24),
        evaluation=score(last) if last is not None else None,
        measure=measured(measure(last)) if last is not None else "",
        evaluated_at=last.step if last is not None else None,
        began=overview.first.started_at,
    )


async def evaluation_lines(overview: RunOverview, listed: ListedRun, source: DashboardSource) -> list[EvaluationLine]:
    """The evaluations inside a run, and those that belong to it, newest step first."""
    others = listed.evaluations if listed.row.run == overview.run else ()
    lines: list[EvaluationLine] = []
    for run in [overview, *await source.overviews(others[:STEPS_SHOWN])]:
        logged = {(entry.split, entry.step): entry for entry in run.evaluations}
        for row in await source.steps(run.run):
            if row.split == "train":
                continue
            entry = logged.pop((row.split or "", row.step), None)
            reward = entry.value("reward") if entry is not None else None
            lines.append(
                EvaluationLine(
                    *(run.run, row.step, row.split, entry.value("success") if entry is not None else None),
                    *(row.reward if reward is None else reward, row.rollouts, row.failed),
                    loss=entry.value(CROSS_ENTROPY) if entry is not None else None,
                )
            )
        # Held-out examples are recorded once, at the step that was measured first.
        lines += [
            EvaluationLine(run.run, step, split, None, None, entry.rollouts, 0, loss=loss, sampled=False)
            for (split, step), entry in logged.items()
            if (loss := entry.value(CROSS_ENTROPY)) is not None
        ]
    return sorted(lines, key=lambda line: -1 if line.step is None else line.step, reverse=True)


def step_table(overview: RunOverview) -> tuple[tuple[str, ...], list[StepLine]]:
    """The headings of a run's table of steps, and one row per update, newest first."""
    supervised = {update.supervised for update in overview.updates}
    columns = (_OF_EXAMPLES if True in supervised else {}) | (_OF_REWARDS if False in supervised else {}) | _OF_ALL
    return tuple(columns), [_line(overview.run, update, columns) for update in reversed(overview.updates)]


def _line(run: str | None, update: TrainUpdate, columns: dict[str, Callable[[TrainUpdate], str]]) -> StepLine:
    step = number(update.result_step) if update.result_step is not None else f"from {number(update.step)}"
    state = "" if update.applied else "nothing learned" if update.state == "done" else update.state
    return StepLine(step, step_url(run, update.step), tuple(cell(update) for cell in columns.values()), state)
