"""Sends a Trainer's events to its trace sinks, and raises the alerts of its steps.

A step has the learner's metrics and those of the first table; an evaluation has those of the second. W&B and TensorBoard
prefix the metrics of steps with `train/`, and those of evaluations with `val/` or `val-sampled/`.

| name | meaning |
|---|---|
| reward, success | means over the step's scored rollouts; success where the reward reports it |
| failed | rollouts without a reward because they raised or timed out |
| seconds/rollouts, seconds/training | wall time of the rollouts with their rewards; of the train request |
| judge/dropped, tie, cut | share of groups that the judge did not score; whose rewards are all equal; whose texts were shortened |
| costs/{purpose} | USD for other LLMs, by what they were asked for; logged before the rollouts are trained |
| tokens/{purpose}/prompt, completion | tokens of the same |
| staleness/mean, max | with overlap: steps made since each rollout began |
| {model}/{metric} | with several models: the same of each model after the first |

| name | meaning |
|---|---|
| reward, reward_spread, reward_error | mean over scenarios; standard deviation over scenarios; standard error of the mean |
| scenarios, failed | evaluated scenarios; rollouts without a reward |
| {metric} | mean over scenarios of each metric that a rollout reported |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from offbook.base import clock
from offbook.base.alerts import signs
from offbook.base.config import TrainConfig
from offbook.base.errors import OffbookError
from offbook.base.redaction import Redaction, error_text
from offbook.base.sync_calls import in_own_thread
from offbook.base.types import Json, TrajectoryGroup
from offbook.contracts import (
    Alert,
    CheckpointSaved,
    EvaluationFinished,
    GroupsFinished,
    RunStarted,
    StepFinished,
    TraceSink,
    digest,
)
from offbook.tracing.fanout import FanOut, sink_name
from offbook.tracing.sink_registry import resolve_sinks

from .evaluate import Evaluation
from .models import Models, StepOutcome, save_rollouts
from .options import TrainerOptions
from .report import Iteration

logger = logging.getLogger("offbook")

CHECK_SECONDS = 10.0
"""How long the start of a run waits for a sink's check."""


class SinkPublisher:
    """The trace sinks of a Trainer. Without sinks, only alerts are computed."""

    def __init__(self, models: Models, options: TrainerOptions) -> None:
        self._models = models
        self._options = options
        self._sinks: list[TraceSink] = resolve_sinks(options.sinks)
        self._fanout: FanOut | None = None
        self._history: list[Mapping[str, float]] = []
        self._run = ""

    async def started(self, run: str, step: int) -> None:
        """Check the credentials of all sinks, for a bounded time, then publish the start of the run. Raises ConfigError."""
        self._run, self._history = run, []
        if not self._sinks:
            return
        await asyncio.gather(*(_check(sink) for sink in self._sinks))
        self._fanout = FanOut(self._sinks, run, [await self._models[0].api()])
        self._fanout.publish(
            RunStarted(run, self._models[0].name, step, clock.now(), settings(self._options, self._models))
        )

    async def groups(self, groups: Sequence[TrajectoryGroup], step: int, split: str) -> None:
        """Store the rollouts on the server, from which sinks read them, and publish them."""
        if self._fanout is None:
            return
        await save_rollouts(self._models, groups)
        self._fanout.publish(GroupsFinished(self._run, split, step, _ids(groups)))

    def evaluation(self, evaluation: Evaluation, groups: Sequence[TrajectoryGroup], split: str) -> None:
        """Publish an evaluation. Its rollouts must be on the server."""
        if self._fanout is None:
            return
        model, now = self._models[0].name, clock.now()
        named = evaluation.as_metrics()
        event = EvaluationFinished(self._run, model, split, evaluation.step, now, named, _ids(groups))
        self._fanout.publish(event)

    def step(self, iteration: Iteration, groups: Sequence[TrajectoryGroup], began: int) -> Iteration:
        """Publish a step, its checkpoints and its alerts. Returns the iteration with its alerts. `began`: the first
        model's step when the rollouts started."""
        self._history.append(iteration.metrics)
        now, first = clock.now(), self._models[0].name
        alerts = tuple(
            Alert(self._run, first, iteration.step, now, sign.kind, sign.message, sign.value, sign.limit)
            for sign in signs(self._history, self._options.alert_limits)
        )
        if self._fanout is not None:
            untrained = "" if iteration.applied else digest(*_ids(groups))
            metrics = sink_metrics(iteration)
            self._fanout.publish(StepFinished(self._run, first, iteration.step, began, now, metrics, untrained))
            for name, trained in iteration.models.items():
                if trained.outcome == StepOutcome.TRAINED and trained.checkpoint is not None:
                    saved = CheckpointSaved(self._run, name, trained.step, trained.checkpoint, trained.metrics)
                    self._fanout.publish(saved)
            for alert in alerts:
                self._fanout.publish(alert)
        return replace(iteration, alerts=alerts)

    def close(self) -> list[str]:
        """Wait a bounded time for the sinks. Returns lines about events that they did not accept."""
        fanout, self._fanout = self._fanout, None
        return fanout.close() if fanout is not None else []


async def _check(sink: TraceSink) -> None:
    check = asyncio.ensure_future(in_own_thread(sink.check))
    done, _ = await asyncio.wait([check], timeout=CHECK_SECONDS)
    error = check.exception() if done else TimeoutError(f"no answer within {CHECK_SECONDS:g} s")
    check.cancel()
    if isinstance(error, OffbookError):
        raise error
    if error is not None:
        why = str(error) if isinstance(error, OSError) else error_text(error)
        logger.warning(
            "trace sink %r does not answer, what it misses is sent again when the run ends: %s", sink_name(sink), why
        )


def _ids(groups: Sequence[TrajectoryGroup]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(group.place.group for group in groups if group.place.group is not None))


def settings(options: TrainerOptions, models: Models) -> dict[str, Json]:
    """The options of a run as JSON, without keys. Functions and objects are replaced by their names."""
    left_out = ("sinks", "progress", "eval", "run", "runner")
    names = [option.name for option in fields(TrainerOptions) if option.name not in left_out]
    values: dict[str, Json] = {name: _plain(getattr(options, name)) for name in names}
    named = [{"name": model.name, "project": model.project, "base_model": model.base_model} for model in models]
    evaluated = len(list(options.eval or ()))
    return Redaction().value({**values, "models": named, "eval_scenarios": evaluated})


def _plain(value: object) -> Json:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, TrainConfig):
        return value.model_dump(mode="json")
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(field) for name, field in vars(value).items()}
    return getattr(value, "__qualname__", None) or repr(value)[:200]


def sink_metrics(iteration: Iteration) -> dict[str, float]:
    """The metrics of a step for trace sinks: the first model's, and those of other models prefixed with the model's
    name."""
    _, *others = iteration.models.items()
    timed = {"seconds/rollouts": iteration.rollout_seconds, "seconds/training": iteration.train_seconds}
    metrics = {**iteration.metrics, **timed, "reward": iteration.reward, "failed": float(iteration.failed)}
    if iteration.success is not None:
        metrics["success"] = iteration.success
    for name, model in others:
        metrics |= {f"{name}/{metric}": value for metric, value in model.metrics.items()}
        metrics[f"{name}/step"] = model.step
    return metrics
