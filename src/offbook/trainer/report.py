"""The report of a training run: iterations, evaluations, why it stopped, and the folders of the LoRAs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from offbook.base.types import TrajectoryGroup
from offbook.client.rollouts.failures import (
    FailureKind,
    failure_kinds,
    failures,
    merged,
    summary,
)
from offbook.contracts import Alert
from offbook.llms.ledger import SpendingTotals

from .evaluate import Evaluation, mean
from .models import ModelStep, StepOutcome


class Stopped(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"  # every model has reached `steps`
    NOTHING_LEFT = "nothing_left"  # every model had reached `steps` before the run
    SOLVED = "solved"  # no signal for `patience` iterations, the mean reward has reached the target, and it has learned
    NO_SIGNAL = "no_signal"  # no signal for `patience` iterations otherwise
    BUDGET = "budget"  # `max_cost` for other LLMs is spent
    NO_CALLS = "no_calls"  # nothing was trained for `patience` iterations, in which one of several models had no call


@dataclass(frozen=True)
class Iteration:
    """The rollouts of one iteration, and the train requests on them. `reward`: mean over scored rollouts. `step`,
    `applied` and `metrics` are the first model's; `models` holds all models' results by name."""

    step: int
    applied: bool
    reward: float
    success: float | None
    failed: int
    rollout_seconds: float
    train_seconds: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    models: dict[str, ModelStep] = field(default_factory=dict[str, ModelStep])
    failures: tuple[FailureKind, ...] = ()  # of the `failed` rollouts
    alerts: tuple[Alert, ...] = ()  # metrics that crossed their limits

    @property
    def steps(self) -> dict[str, int]:
        """The models' steps afterwards, by name."""
        return {name: step.step for name, step in self.models.items()}

    @property
    def trained(self) -> bool:
        """Whether any model was trained."""
        return any(step.outcome == StepOutcome.TRAINED for step in self.models.values())


@dataclass(frozen=True)
class ModelReport:
    """One model's step before and after, and the folder of its newest LoRA."""

    started: int
    step: int
    checkpoint: str | None


@dataclass(frozen=True, repr=False)
class TrainReport:
    """The result of `Trainer.train`. `model`, `started`, `step` and `checkpoint` (folder of the newest LoRA) are the
    first model's; `models` holds all models' by name. `run`: the run's id in the server's lists. `spending`: tokens
    and costs of other LLMs, by purpose."""

    model: str
    started: int
    step: int
    stopped: Stopped
    iterations: tuple[Iteration, ...]
    evaluations: tuple[Evaluation, ...]
    checkpoint: str | None
    models: dict[str, ModelReport] = field(default_factory=dict[str, ModelReport])
    run: str = ""
    spending: dict[str, SpendingTotals] = field(default_factory=dict[str, SpendingTotals])

    @property
    def rewards(self) -> list[float]:
        """The mean reward of every iteration."""
        return [iteration.reward for iteration in self.iterations]

    @property
    def failures(self) -> tuple[FailureKind, ...]:
        """Why rollouts failed, including those of evaluations; the most frequent kind first."""
        return merged(kind for part in (*self.iterations, *self.evaluations) for kind in part.failures)

    def __repr__(self) -> str:
        rewards = f"reward {self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}, " if self.rewards else ""
        models = ", ".join(f"{name}: step {model.started} -> {model.step}" for name, model in self.models.items())
        saved = {name: model.checkpoint for name, model in self.models.items()}
        where = f"checkpoint={self.checkpoint!r}" if len(saved) < 2 else f"checkpoints={saved!r}"
        failed = f", failures: {summary(self.failures)}" if self.failures else ""
        return f"TrainReport({models}, {rewards}{self.stopped}, {where}{failed})"


def make_iteration(
    groups: Sequence[TrajectoryGroup],
    models: Mapping[str, ModelStep],
    rollout_seconds: float,
    train_seconds: float,
    spent: Mapping[str, float],
) -> Iteration:
    """Build an iteration from its groups, with at least one scored rollout, the models' results, wall times in
    seconds, and the token and cost metrics of other LLMs."""
    scored = [trajectory for group in groups for trajectory in group if trajectory.reward is not None]
    failed = failures(groups)
    successes = [float(trajectory.metrics["success"]) for trajectory in scored if "success" in trajectory.metrics]
    first = next(iter(models.values()))
    return Iteration(
        step=first.step,
        applied=first.outcome == StepOutcome.TRAINED,
        reward=mean([float(trajectory.reward or 0.0) for trajectory in scored]),
        success=mean(successes) if successes else None,
        failed=len(failed),
        rollout_seconds=rollout_seconds,
        train_seconds=train_seconds,
        failures=failure_kinds(failed),
        metrics=first.metrics | judge_metrics(groups) | dict(spent),
        models=dict(models),
    )


def judge_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The mean over groups of every metric `judge/...`. The mean of a flag, such as `judge/dropped`, is a share."""
    names = {name for group in groups for name in group.metrics if name.startswith("judge/")}
    return {
        name: mean([float(group.metrics[name]) for group in groups if name in group.metrics]) for name in sorted(names)
    }


def verdict(iterations: Sequence[Iteration], patience: int, target_reward: float, *, learned: bool) -> Stopped | None:
    """The reason to stop if the last `patience` iterations trained nothing, else None. `learned`: whether a step was
    applied or an evaluation reached the target; without it, equal rewards show only that the scenarios teach nothing."""
    last = iterations[-patience:]
    if len(last) < patience or any(iteration.trained for iteration in last):
        return None
    if never_called(last):
        return Stopped.NO_CALLS
    reached = mean([iteration.reward for iteration in last]) >= target_reward
    return Stopped.SOLVED if reached and learned else Stopped.NO_SIGNAL


def never_called(iterations: Sequence[Iteration]) -> list[str]:
    """Names of the models that had no calls in all of these iterations."""
    without = [
        {name for name, step in iteration.models.items() if step.outcome == StepOutcome.NO_CALLS}
        for iteration in iterations
    ]
    return sorted(set[str].intersection(*without)) if without else []
