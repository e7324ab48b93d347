"""The result of an evaluation: scores by scenario, pass@k, means with bootstrap intervals; its JSON report, and a regression gate.
Evaluations train nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
from pydantic import TypeAdapter, ValidationError

from offbook.base.config import describe
from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json
from offbook.base.text import counted
from offbook.base.types import Trajectory, TrajectoryGroup
from offbook.client.rollouts.failures import (
    FailureKind,
    failure_kinds,
    failures,
    merged,
    summary,
)

_failures_printed: ContextVar[bool] = ContextVar("offbook_failures_printed", default=False)


@contextmanager
def printing_failures() -> Generator[None]:
    """Inside the block, in this context, evaluations log no warning about failed rollouts: the caller prints the
    evaluation, whose line counts them."""
    token = _failures_printed.set(True)
    try:
        yield
    finally:
        _failures_printed.reset(token)


def failures_printed() -> bool:
    """Whether the caller prints the failed rollouts of an evaluation itself."""
    return _failures_printed.get()


@dataclass(frozen=True)
class ScenarioScore:
    """The rewards of one scenario's scored rollouts, in order. `successes`: the metric `success` of those that report
    it. `failed`: number of rollouts without a reward."""

    id: str
    rewards: tuple[float, ...]
    successes: tuple[float, ...]
    failed: int

    def succeeded(self, success_at: float | None) -> tuple[bool, ...]:
        """For every scored rollout, whether its reward is at least `success_at`; if that is None, whether its metric
        `success` is 1."""
        if success_at is not None:
            return tuple(reward >= success_at for reward in self.rewards)
        return tuple(success >= 1 for success in self.successes)


@dataclass(frozen=True)
class Evaluation:
    """Means over scenarios, every scenario with the same weight.

    `scenarios`: evaluated; `scored`: those with a scored rollout; `failed`: rollouts without a reward. `reward_spread`:
    standard deviation over scenarios; `reward_error`: standard error of the mean. `metrics`: mean of every metric that
    scored rollouts report. `step`: the first model's; `steps`: all models', by name."""

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
    scores: tuple[ScenarioScore, ...] = ()

    def __str__(self) -> str:
        """The evaluation in one line, with the interval of the mean reward and the causes of failed rollouts."""
        sampled = (
            "at the agent's temperature" if self.temperature is None else f"sampled at temperature {self.temperature:g}"
        )
        kind = "greedy" if self.temperature == 0 else sampled
        success = "" if self.success is None else f"success {self.success:.0%}, "
        failed = f", {failed_note(self.failed, self.failures)}" if self.failed else ""
        rewards = list(self.rewards().values())
        reward = "-" if self.reward is None else f"{self.reward:.3f}"
        reward = mean_reward(rewards).text() if len(rewards) > 1 else reward
        where = steps_line(self.steps) if self.steps else f"step {self.step}"
        return f"{where}, {kind}, {counted(self.scored, 'scenario')}: {success}reward {reward}{failed}"

    @property
    def success(self) -> float | None:
        """The mean of the metric `success`; None if no rollout reports it."""
        return self.metrics.get("success")

    def rewards(self) -> dict[str, float]:
        """The mean reward of the scored rollouts, by scenario id."""
        return {score.id: mean(score.rewards) for score in self.scores if score.rewards}

    def successes(self, success_at: float | None = None) -> dict[str, float]:
        """The share of scored rollouts that succeeded, by scenario id; see `ScenarioScore.succeeded`."""
        succeeded = {score.id: score.succeeded(success_at) for score in self.scores}
        return {name: mean(values) for name, values in succeeded.items() if values}

    def pass_at(self, k: int, success_at: float | None = None) -> float:
        """pass@k: the mean over scenarios of the probability that at least one of k rollouts succeeds. Scenarios with
        fewer than k scored rollouts are left out. Raises ConfigError if none is left."""
        counted = [values for score in self.scores if len(values := score.succeeded(success_at)) >= k]
        if not counted:
            raise ConfigError(
                f"pass@{k}: no scenario has {k} rollouts with a success: run more with rollouts=, report a metric "
                "`success`, or say from which reward on a rollout succeeds (success_at=)"
            )
        return mean([pass_at_k(len(values), sum(values), k) for values in counted])

    def as_metrics(self) -> dict[str, float]:
        """The metrics that trace sinks and `model.log` receive. What was not measured is left out."""
        named = {"scenarios": float(self.scenarios), "failed": float(self.failed), **self.metrics}
        if self.reward is not None:
            named["reward"] = self.reward
        if self.scored > 1:
            named |= {"reward_spread": self.reward_spread, "reward_error": self.reward_error}
        return named


def steps_line(steps: Mapping[str, int]) -> str:
    """`step 3`, or `step 3 (writer: 2)` with several models."""
    (_, first), *others = steps.items()
    also = ", ".join(f"{name}: {step}" for name, step in others)
    return f"step {first} ({also})" if also else f"step {first}"


def failed_note(count: int, kinds: Sequence[FailureKind]) -> str:
    """`2 rollouts failed: 2 x KeyError: 'city' at app.py:31`."""
    return f"{count} rollout{'s' * (count != 1)} failed: {summary(kinds)}"


def summarise(groups: Sequence[TrajectoryGroup], steps: Mapping[str, int], temperature: float | None) -> Evaluation:
    """The evaluation of `groups`, one per scenario. A scenario's value is the mean over its scored rollouts; failed
    rollouts do not count as 0. `steps`: the models' steps by name, the first model first."""
    rewards: list[float] = []
    metrics: dict[str, list[float]] = {}
    failed = 0
    for group in groups:
        scored = _scored(group)
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
        scores=tuple(_score(group, number) for number, group in enumerate(groups)),
    )


def _score(group: TrajectoryGroup, number: int) -> ScenarioScore:
    scored = _scored(group)
    places = (group.place, *(trajectory.place for trajectory in group))
    return ScenarioScore(
        id=next((place.scenario for place in places if place.scenario is not None), str(number)),
        rewards=tuple(float(trajectory.reward or 0.0) for trajectory in scored),
        successes=tuple(
            float(trajectory.metrics["success"]) for trajectory in scored if "success" in trajectory.metrics
        ),
        failed=len(group) + len(group.exceptions) - len(scored),
    )


def _scored(group: TrajectoryGroup) -> list[Trajectory]:
    return [trajectory for trajectory in group if trajectory.reward is not None and not trajectory.exception]


def unscored_kinds(groups: Sequence[TrajectoryGroup]) -> tuple[FailureKind, ...]:
    """Why rollouts are unscored: their exceptions by kind, and the reason for those without exception."""
    silent: Counter[str] = Counter()
    for group in groups:
        dropped = next((line for line in group.logs if line.startswith("the judge ")), "no reward was set")
        silent[dropped] += sum(trajectory.reward is None and trajectory.exception is None for trajectory in group)
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


RESAMPLES = 10_000
LEVEL = 0.95
_BLOCK = 4_000_000
"""Random numbers drawn per block, to bound the memory."""


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval of level `level` over the choice of scenarios."""

    mean: float
    low: float
    high: float
    level: float = LEVEL

    def text(self, sign: str = "") -> str:
        """`0.500, 95 % interval 0.250 to 0.750`; `sign="+"` shows the signs."""
        mean, low, high = (f"{value:{sign}.3f}" for value in (self.mean, self.low, self.high))
        return f"{mean}, {100 * self.level:.0f} % interval {low} to {high}"


def pass_at_k(rollouts: int, successes: int, k: int) -> float:
    """An unbiased estimate of the probability that at least one of `k` rollouts succeeds, from n = `rollouts` rollouts
    with c = `successes` successes: 1 - C(n - c, k) / C(n, k) (2107.03374, equation 1). Raises ConfigError if k > n.

    1 of 4 rollouts succeeded. pass@1 is 1/4, and pass@2 is 1 - C(3, 2) / C(4, 2) = 1/2:

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2)
    (0.25, 0.5)
    """
    if not 1 <= k <= rollouts:
        raise ConfigError(f"pass@{k}: at least {k} scored rollouts of a scenario are needed, it has {rollouts}")
    return 1.0 - math.comb(rollouts - successes, k) / math.comb(rollouts, k)


def bootstrap_mean(
    values: Sequence[float], *, seed: int = 0, level: float = LEVEL, resamples: int = RESAMPLES
) -> Interval:
    """The mean of one value per scenario, with its bootstrap percentile interval (Efron and Tibshirani 1993, chapter
    13).

    Scenarios are resampled with replacement, not rollouts: rollouts of one scenario are not independent. With one
    value, or equal values, the interval has length 0 and says nothing about other scenarios. Raises ConfigError for no
    values."""
    if not values:
        raise ConfigError(
            "interval: no scenario has a value: all rollouts failed or have no reward. Look at their failures"
        )
    array = np.asarray(values, np.float64)
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK // len(array))
    means: list[float] = []
    for begin in range(0, resamples, block):
        drawn = generator.integers(len(array), size=(min(block, resamples - begin), len(array)))
        means.extend(array[drawn].mean(axis=1).tolist())
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(math.fsum(values) / len(values), float(low), float(high), level)


def mean_reward(values: Sequence[float], *, seed: int = 0, level: float = LEVEL) -> Interval:
    """The mean reward of scenarios with its interval: `bootstrap_mean`'s, but where all values are 0 or all are 1 the
    exact one of a binomial (Clopper and Pearson 1934), since a bootstrap of equal values has length 0.

    >>> mean_reward([1.0] * 40).text()
    '1.000, 95 % interval 0.912 to 1.000'
    """
    if set(values) not in ({0.0}, {1.0}):
        return bootstrap_mean(values, seed=seed, level=level)
    bound = ((1 - level) / 2) ** (1 / len(values))
    low, high = (bound, 1.0) if values[0] else (0.0, 1 - bound)
    return Interval(float(values[0]), low, high, level)


def paired_difference(
    values: dict[str, float], baseline: dict[str, float], *, seed: int = 0, level: float = LEVEL
) -> Interval:
    """The mean of `values` - `baseline` over their common scenario ids, with its bootstrap interval. A scenario's
    difficulty cancels in the difference, so the interval is narrower than those of the two means. Raises ConfigError
    if no scenario is common."""
    shared = sorted(values.keys() & baseline.keys())
    if not shared:
        raise ConfigError("difference: the two evaluations share no scenario (by id): compare them on the same file")
    return bootstrap_mean([values[name] - baseline[name] for name in shared], seed=seed, level=level)


def report_json(evaluation: Evaluation) -> str:
    """The evaluation as JSON for `read_report`, plus the field `success`."""
    return json.dumps(asdict(evaluation) | {"success": evaluation.success}, indent=1) + "\n"


def read_report(file: Path) -> Evaluation:
    """Read the file that `offbook eval --results` wrote. Raises ConfigError, which names the faulty field."""
    try:
        loaded: object = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a report of `offbook eval --results`: {error}") from error
    fields = cast(dict[str, object], loaded) if isinstance(loaded, dict) else {}
    if not fields.get("scores"):
        raise ConfigError(f"{file} is not a report of `offbook eval --results`: it has no `scores`")
    try:
        return TypeAdapter(Evaluation).validate_python(
            {name: value for name, value in fields.items() if name != "success"}
        )
    except ValidationError as error:
        raise ConfigError(
            f"{file} is not a report of `offbook eval --results`:\n{describe(error, file.name)}"
        ) from error


def measured(evaluation: Evaluation, success_at: float | None) -> tuple[str, dict[str, float]]:
    """The measure of the evaluation and its values by scenario id: `success` if any scenario has one, else `reward`."""
    successes = evaluation.successes(success_at)
    return ("success", successes) if successes else ("reward", evaluation.rewards())


def interval_lines(evaluation: Evaluation, success_at: float | None = None) -> list[str]:
    """The mean with its 95 % interval over scenarios, and pass@k if scenarios have several rollouts."""
    name, values = measured(evaluation, success_at)
    if not values:
        return []
    lines = [f"{name} {mean_reward(list(values.values())).text()} over {counted(len(values), 'scenario')}"]
    most = max((len(score.succeeded(success_at)) for score in evaluation.scores), default=0)
    if name == "success" and most > 1:
        lines.append(", ".join(f"pass@{k} {evaluation.pass_at(k, success_at):.3f}" for k in dict.fromkeys((1, most))))
    return lines


class RegressionGate:
    """Fails an evaluation that is below a number, or worse than an earlier report with 95 % confidence."""

    def __init__(self, below: float | None, worse_than: Path | None, success_at: float | None = None) -> None:
        self._below = below
        self._baseline = None if worse_than is None else (worse_than, read_report(worse_than))
        self._success_at = success_at

    def examine(self, evaluation: Evaluation) -> tuple[list[str], list[str]]:
        """(lines to print, reasons to fail); without reasons, the evaluation passes. Raises ConfigError for a baseline
        of other scenarios or with another measure."""
        lines: list[str] = []
        faults: list[str] = []
        name, values = measured(evaluation, self._success_at)
        if not values:
            return lines, faults
        mean = sum(values.values()) / len(values)
        if self._below is not None and mean < self._below:
            faults.append(f"--fail-below {self._below:g}: {name} {mean:.3f} is below it")
        if self._baseline is not None:
            file, baseline = self._baseline
            other, before = measured(baseline, self._success_at)
            if other != name:
                raise ConfigError(f"{file} measures {other}, this evaluation {name}: give --success-at to compare them")
            difference = paired_difference(values, before)
            shared = len(values.keys() & before.keys())
            lines.append(
                f"{name} against {file}: {difference.text('+')} on {counted(shared, 'scenario')} that both have"
            )
            if difference.high < 0:
                faults.append(f"--fail-if-worse-than {file}: {name} is lower by {-difference.mean:.3f}")
        return lines, faults
