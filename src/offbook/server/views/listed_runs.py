"""Lists runs so that an evaluation stands under the training that it belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from offbook.server.records.overview import RunRow

from .run_index import TrainUpdate, UpdateIndex


@dataclass(frozen=True)
class ListedRun:
    """A run that stands for itself, and the evaluations that belong to it, newest first."""

    row: RunRow
    evaluations: tuple[RunRow, ...] = ()


def under_trainings(rows: Sequence[RunRow], updates: UpdateIndex) -> list[ListedRun]:
    """The runs, most recently active first, where a training is as active as its newest evaluation.

    An evaluation belongs to the training that made the step which it measures; before the first step, to the training
    that began there. It stands for itself if its model was never trained in a run with a name."""
    makers = _makers(updates)
    heads: dict[str | None, RunRow] = {row.run: row for row in rows}
    order: dict[str | None, list[RunRow]] = {}
    for row in rows:
        training = None if row.trains or updates.of_run(row.run) else _training_of(row, makers)
        if training in heads and training is not None:
            order.setdefault(training, []).append(row)
        else:
            order.setdefault(row.run, [])
    return [ListedRun(heads[run], tuple(evaluations)) for run, evaluations in order.items()]


def _makers(updates: UpdateIndex) -> dict[tuple[str, int], list[TrainUpdate]]:
    """By model and step: the updates that made the step, oldest first; for a step that none made, those that began
    there."""
    makers: dict[tuple[str, int], list[TrainUpdate]] = defaultdict(list)
    beginners: dict[tuple[str, int], list[TrainUpdate]] = defaultdict(list)
    for update in updates.all():
        if update.run is not None and update.applied and update.result_step is not None:
            makers[update.model, update.result_step].append(update)
            beginners[update.model, update.result_step - 1].append(update)
    return {**beginners, **makers}


def _training_of(row: RunRow, makers: dict[tuple[str, int], list[TrainUpdate]]) -> str | None:
    """The run that an evaluation belongs to. A name may be used again for a new model, whose steps are made again: the
    last update before the evaluation counts, or the first one after it."""
    candidates = makers.get((row.model, row.step), []) if row.step is not None else []
    before = [update for update in candidates if update.created_at <= row.ended_at]
    return next((update.run for update in [*before[-1:], *candidates[:1]]), None)
