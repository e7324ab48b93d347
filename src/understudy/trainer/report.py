"""What a training run was: its iterations, evaluations, why it stopped and where each LoRA is."""

from __future__ import annotations

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from understudy.types import RolloutException, TrajectoryGroup

from .evaluate import Evaluation, mean
from .models import ModelStep, StepOutcome

_INSTALLED = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
LIBRARY_FOLDERS = tuple(
    str(Path(path).resolve()) + os.sep
    for path in (*_INSTALLED, Path(__file__).parents[1], Path(__file__).parents[3] / "integrations")
)
"""Code that is not the user's."""
OUR_OWN = frozenset({"RolloutError", "TimeoutError"})
"""Errors whose message says what to do, wherever they were raised."""


class Stopped(StrEnum):
    FINISHED = "finished"  # every model has reached `steps`
    NOTHING_LEFT = "nothing_left"  # every model had reached `steps` before
    SOLVED = "solved"  # no signal, and the mean reward has reached the target
    NO_SIGNAL = "no_signal"  # no signal for `patience` iterations, below the target
    NO_CALLS = "no_calls"  # for `patience` iterations nothing was trained, and one of several models was never called


@dataclass(frozen=True)
class Iteration:
    """Rollouts, and one train request per model. `reward` is the mean over scored rollouts. `step`, `applied` and
    `metrics` are the first model's; `models` has what was done for each, by name."""

    step: int
    applied: bool
    reward: float
    success: float | None
    failed: int
    rollout_seconds: float
    train_seconds: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    models: dict[str, ModelStep] = field(default_factory=dict[str, ModelStep])

    @property
    def steps(self) -> dict[str, int]:
        """The step of each model afterwards."""
        return {name: step.step for name, step in self.models.items()}

    @property
    def trained(self) -> bool:
        """Whether any model was."""
        return any(step.outcome == StepOutcome.TRAINED for step in self.models.values())


@dataclass(frozen=True)
class ModelReport:
    """One model's step before and after, and the folder of its newest LoRA."""

    started: int
    step: int
    checkpoint: str | None


@dataclass(frozen=True, repr=False)
class TrainReport:
    """`model`, `started`, `step` and `checkpoint` (the newest LoRA's folder) are the first model's; `models` has those of
    each, by name. `run` is the id that the server lists its rollouts by."""

    model: str
    started: int
    step: int
    stopped: Stopped
    iterations: tuple[Iteration, ...]
    evaluations: tuple[Evaluation, ...]
    checkpoint: str | None
    models: dict[str, ModelReport] = field(default_factory=dict[str, ModelReport])
    run: str = ""

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each iteration."""
        return [iteration.reward for iteration in self.iterations]

    def __repr__(self) -> str:
        rewards = f"reward {self.rewards[0]:.3f} -> {self.rewards[-1]:.3f}, " if self.rewards else ""
        models = ", ".join(f"{name}: step {each.started} -> {each.step}" for name, each in self.models.items())
        saved = {name: each.checkpoint for name, each in self.models.items()}
        where = f"checkpoint={self.checkpoint!r}" if len(saved) < 2 else f"checkpoints={saved!r}"
        return f"TrainReport({models}, {rewards}{self.stopped}, {where})"


def make_iteration(
    groups: Sequence[TrajectoryGroup], models: Mapping[str, ModelStep], rollout_seconds: float, train_seconds: float
) -> Iteration:
    """An iteration from its groups, at least one rollout of which is scored, and what was done for each model."""
    scored = [trajectory for group in groups for trajectory in group if trajectory.reward is not None]
    successes = [float(trajectory.metrics["success"]) for trajectory in scored if "success" in trajectory.metrics]
    first = next(iter(models.values()))
    return Iteration(
        step=first.step,
        applied=first.outcome == StepOutcome.TRAINED,
        reward=mean([float(trajectory.reward or 0.0) for trajectory in scored]),
        success=mean(successes) if successes else None,
        failed=len(failures(groups)),
        rollout_seconds=rollout_seconds,
        train_seconds=train_seconds,
        metrics=first.metrics,
        models=dict(models),
    )


def verdict(iterations: Sequence[Iteration], patience: int, target_reward: float) -> Stopped | None:
    """Whether the last iterations say that going on is of no use."""
    last = iterations[-patience:]
    if len(last) < patience or any(iteration.trained for iteration in last):
        return None
    if never_called(last):
        return Stopped.NO_CALLS
    return Stopped.SOLVED if mean([each.reward for each in last]) >= target_reward else Stopped.NO_SIGNAL


def never_called(iterations: Sequence[Iteration]) -> list[str]:
    """The models without calls in every one of these iterations."""
    without = [
        {name for name, step in iteration.models.items() if step.outcome == StepOutcome.NO_CALLS}
        for iteration in iterations
    ]
    return sorted(set[str].intersection(*without)) if without else []


def failures(groups: Sequence[TrajectoryGroup]) -> list[RolloutException]:
    """The exceptions that ended rollouts."""
    found = [error for group in groups for error in group.exceptions]
    return found + [each.exception for group in groups for each in group if each.exception is not None]


def causes(groups: Sequence[TrajectoryGroup]) -> str:
    """Why rollouts are unscored, the commonest first: `30 x TimeoutError: ...; 2 x no reward was set`."""
    counts = Counter(f"{error.type}: {error.message}".strip() + _place(error) for error in failures(groups))
    for group in groups:
        dropped = next((line for line in group.logs if line.startswith("the judge ")), "no reward was set")
        silent = sum(each.reward is None and each.exception is None for each in group)
        counts.update({dropped: silent} if silent else {})
    return "; ".join(f"{times} x {cause}" for cause, times in counts.most_common(5)) or "no rollout was made"


def _place(error: RolloutException) -> str:
    """The innermost line of the user's own in a traceback, as ` (app.py:12 in node)`; empty where there is none."""
    lines = re.findall(r'File "([^"<]+)", line (\d+), in (\S+)', error.traceback)
    own = [(file, line, name) for file, line, name in lines if not file.startswith(LIBRARY_FOLDERS)]
    if error.type in OUR_OWN or not own:
        return ""
    file, line, name = own[-1]
    return f" ({Path(file).name}:{line} in {name})"
