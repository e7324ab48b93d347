"""What a training run was: its iterations, evaluations, why it stopped and where the LoRA is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from understudy.types import RolloutException, TrainResult, TrajectoryGroup

from .evaluate import Evaluation, mean


class Stopped(StrEnum):
    FINISHED = "finished"  # the model has reached `steps`
    NOTHING_LEFT = "nothing_left"  # the model had reached `steps` before
    SOLVED = "solved"  # no signal, and the mean reward has reached the target
    NO_SIGNAL = "no_signal"  # no signal for `patience` iterations, below the target


@dataclass(frozen=True)
class Iteration:
    """Rollouts and one train request. `reward` is the mean over scored rollouts."""

    step: int
    applied: bool
    reward: float
    success: float | None
    failed: int
    rollout_seconds: float
    train_seconds: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, repr=False)
class TrainReport:
    """`started` and `step` are the model's step before and after; `checkpoint` is the newest LoRA's folder."""

    model: str
    started: int
    step: int
    stopped: Stopped
    iterations: tuple[Iteration, ...]
    evaluations: tuple[Evaluation, ...]
    checkpoint: str | None

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each iteration."""
        return [iteration.reward for iteration in self.iterations]

    def __repr__(self) -> str:
        rewards = f"reward {self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}, " if self.rewards else ""
        return (
            f"TrainReport({self.model}: step {self.started} -> {self.step}, {rewards}{self.stopped}, "
            f"checkpoint={self.checkpoint!r})"
        )


def make_iteration(
    groups: Sequence[TrajectoryGroup], result: TrainResult, rollout_seconds: float, train_seconds: float
) -> Iteration:
    """An iteration from its groups, at least one rollout of which is scored, and the train request's result."""
    scored = [trajectory for group in groups for trajectory in group if trajectory.reward is not None]
    successes = [float(trajectory.metrics["success"]) for trajectory in scored if "success" in trajectory.metrics]
    return Iteration(
        step=result.step,
        applied=result.applied,
        reward=mean([float(trajectory.reward or 0.0) for trajectory in scored]),
        success=mean(successes) if successes else None,
        failed=len(failures(groups)),
        rollout_seconds=rollout_seconds,
        train_seconds=train_seconds,
        metrics=result.metrics,
    )


def failures(groups: Sequence[TrajectoryGroup]) -> list[RolloutException]:
    """The exceptions that ended rollouts."""
    found = [error for group in groups for error in group.exceptions]
    return found + [each.exception for group in groups for each in group if each.exception is not None]


def causes(groups: Sequence[TrajectoryGroup]) -> str:
    """Why rollouts are unscored, the commonest first: `30 x TimeoutError: ...; 2 x no reward`."""
    counts = Counter(f"{error.type}: {error.message}".strip() for error in failures(groups))
    silent = sum(1 for group in groups for each in group if each.reward is None and each.exception is None)
    if silent:
        counts["no reward was set"] = silent
    return "; ".join(f"{times} x {cause}" for cause, times in counts.most_common(5)) or "no rollout was made"
