"""Alerts: signs in the metrics of a step that training goes wrong. Pure functions; the limits are options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .errors import ConfigError

AlertKind: TypeAlias = Literal["no_spread", "entropy_collapse", "kl", "parse_failures", "cut_off", "judge_disagreement"]
Metrics: TypeAlias = Mapping[str, float]
"""Name of a metric -> its value at one step."""


@dataclass(frozen=True)
class AlertLimits:
    """When a step raises an alert; None turns that alert off. Shares are between 0 and 1, KL and entropy in nats per
    token. Raises ConfigError for a value that is negative or no number."""

    no_spread_share: float | None = 0.8  # of groups with equal rewards, in `no_spread_steps` steps in a row
    no_spread_steps: int = 3
    entropy_share: float | None = 0.1  # of the entropy of the run's first step
    sampler_kl: float | None = 0.05  # between sampler and learner
    base_kl: float | None = 10.0  # between policy and base model, if it is measured
    parse_failure_share: float | None = 0.1  # of answers with a tool call that does not parse
    cut_off_share: float | None = 0.1  # of answers that ended at a limit of tokens
    judge_disagreement: float | None = 0.25  # mean standard deviation of several judges' scores

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (isinstance(value, int | float) and value >= 0):
                raise ConfigError(f"alert_limits: {name} is {value!r}: set a number of at least 0, or None")


@dataclass(frozen=True)
class Sign:
    """A limit that a step crossed: the metric's `value`, and the `limit`."""

    kind: AlertKind
    message: str
    value: float
    limit: float


def signs(history: Sequence[Metrics], limits: AlertLimits) -> list[Sign]:
    """The signs at the last step. `history` are the metrics of the run's steps, oldest first."""
    if not history:
        return []
    possible = [
        no_spread(history, limits.no_spread_share, limits.no_spread_steps),
        entropy_collapse(history, limits.entropy_share),
        above(history[-1], "kl/sampler_learner", limits.sampler_kl, "kl", "sampler and learner disagree: do both load "
              "the same base in the same precision?"),
        above(history[-1], "kl/base", limits.base_kl, "kl", "the policy is far from its base: lower the learning rate "
              "or raise kl_coef"),
        above(history[-1], "calls/parse_failure_rate", limits.parse_failure_share, "parse_failures", "tool calls do not "
              "parse: look at the raw answers and the chat template"),
        above(history[-1], "calls/cut_off_rate", limits.cut_off_share, "cut_off", "answers end at the limit of tokens: "
              "raise max_completion_tokens, or look at what fills them"),
        above(history[-1], "judge/disagreement", limits.judge_disagreement, "judge_disagreement", "the judges "
              "disagree: check them with `offbook judge-check`"),
    ]  # fmt: skip
    return [sign for sign in possible if sign is not None]


def taught_share(step: Metrics) -> float | None:
    """The share of a step's rollouts that were trained with an advantage. The others cost as much and taught nothing."""
    total = step.get("trajectories/total")
    return step.get("trajectories/trained", 0.0) / total if total else None


def no_spread(history: Sequence[Metrics], share: float | None, steps: int) -> Sign | None:
    """A sign if, in each of the last `steps` steps, at least this share of the groups had equal rewards."""
    last = history[-steps:]
    if share is None or steps < 1 or len(last) < steps:
        return None
    shares = [
        step.get("groups/no_spread", 0.0) / step["groups/total"] if step.get("groups/total") else 0.0 for step in last
    ]
    if min(shares) < share:
        return None
    what = f"in {steps} steps almost all groups had equal rewards: {what_to_change(last[-1])}. If the answers of a group are all alike, word the choices differently"
    return Sign("no_spread", what, shares[-1], share)


def what_to_change(step: Metrics) -> str:
    """The advice for groups with equal rewards, by where those lie between the step's lowest and highest reward."""
    names = ("groups/no_spread_reward", "reward/min", "reward/max")
    equal, low, high = (step.get(name) for name in names)
    if equal is None or low is None or high is None or low == high:
        return "use scenarios of another difficulty, or partial rewards"
    if equal - low > high - equal:
        return "most of these are solved, so use harder scenarios, or the same in new words"
    return "most of these fail, so use easier scenarios, partial rewards or a larger group_size"


def entropy_collapse(history: Sequence[Metrics], share: float | None) -> Sign | None:
    """A sign if the entropy fell below this share of the run's first entropy. Imitation lowers it on purpose, so its steps
    raise none."""
    if "loss/cross_entropy" in history[-1]:
        return None
    known = [step["entropy"] for step in history if "entropy" in step]
    if share is None or len(known) < 2 or "entropy" not in history[-1] or known[0] <= 0:
        return None
    limit = known[0] * share
    if known[-1] >= limit:
        return None
    return Sign("entropy_collapse", "the policy's answers hardly vary: lower the learning rate or raise the temperature",
                known[-1], limit)  # fmt: skip


def above(step: Metrics, name: str, limit: float | None, kind: AlertKind, advice: str) -> Sign | None:
    """A sign if the metric `name` is above its limit. `advice` ends the message."""
    value = step.get(name)
    if value is None or limit is None or not value > limit:
        return None
    return Sign(kind, f"{name} is {value:.4g}, above {limit:g}: {advice}", value, limit)
