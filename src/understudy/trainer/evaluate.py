"""Evaluation: every scenario once, scored, with its spread; nothing is trained."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from understudy.client.failures import FailureKind, failure_kinds, failures, merged
from understudy.types import TrajectoryGroup


@dataclass(frozen=True)
class Evaluation:
    """Means over scenarios. `reward_error` is the standard error of the mean reward, `reward_spread` the standard
    deviation over scenarios. `metrics` holds the mean of every metric that a scored rollout reported. `step` is the first
    model's, `steps` that of each."""

    step: int
    temperature: float | None
    scenarios: int
    scored: int
    failed: int
    reward: float | None
    reward_spread: float
    reward_error: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    steps: dict[str, int] = field(default_factory=dict[str, int])
    failures: tuple[FailureKind, ...] = ()  # why `failed` rollouts have no reward

    @property
    def success(self) -> float | None:
        """The mean of the metric `success`, where the reward reports one."""
        return self.metrics.get("success")

    def as_metrics(self) -> dict[str, float]:
        """For sinks and `model.log`."""
        named = {"scenarios": float(self.scenarios), "failed": float(self.failed), **self.metrics}
        if self.reward is not None:
            named |= {"reward": self.reward, "reward_spread": self.reward_spread, "reward_error": self.reward_error}
        return named


def summarise(groups: Sequence[TrajectoryGroup], steps: Mapping[str, int], temperature: float | None) -> Evaluation:
    """One group per scenario; `steps` are the models', the first one's first. A scenario counts once: the mean of its scored rollouts. Failed rollouts are no zeros."""
    rewards: list[float] = []
    metrics: dict[str, list[float]] = {}
    failed = 0
    for group in groups:
        scored = [trajectory for trajectory in group if trajectory.reward is not None and not trajectory.exception]
        failed += len(group) + len(group.exceptions) - len(scored)
        if not scored:
            continue
        rewards.append(mean([float(trajectory.reward or 0.0) for trajectory in scored]))
        for name in {name for trajectory in scored for name in trajectory.metrics}:
            reported = [float(trajectory.metrics[name]) for trajectory in scored if name in trajectory.metrics]
            metrics.setdefault(name, []).append(mean(reported))
    spread = deviation(rewards)
    return Evaluation(
        step=next(iter(steps.values())),
        temperature=temperature,
        scenarios=len(groups),
        scored=len(rewards),
        failed=failed,
        reward=mean(rewards) if rewards else None,
        reward_spread=spread,
        reward_error=spread / math.sqrt(len(rewards)) if rewards else 0.0,
        metrics={name: mean(values) for name, values in sorted(metrics.items())},
        steps=dict(steps),
        failures=unscored_kinds(groups),
    )


def unscored_kinds(groups: Sequence[TrajectoryGroup]) -> tuple[FailureKind, ...]:
    """Why rollouts are unscored: their exceptions by kind, and those that ended well and have no reward."""
    silent: Counter[str] = Counter()
    for group in groups:
        dropped = next((line for line in group.logs if line.startswith("the judge ")), "no reward was set")
        silent[dropped] += sum(each.reward is None and each.exception is None for each in group)
    without = (FailureKind("", why, count=count) for why, count in silent.items() if count)
    return merged([*failure_kinds(failures(groups)), *without])


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))
