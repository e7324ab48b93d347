"""Alerts: signs in the metrics of a step that training goes wrong. Pure functions; the limits are options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .errors import ConfigError

AlertKind: TypeAlias = Literal["no_spread", "collapse", "kl", "parse_failures", "cut_off"]
Metrics: TypeAlias = Mapping[str, float]
"""Name of a metric -> its value at one step."""


@dataclass(frozen=True)
class AlertLimits:
    """When a step raises an alert; None turns that alert off. Shares are between 0 and 1, KL in nats per token. Raises ConfigError for a value that is negative or no number."""

    no_spread_share: float | None = 0.8  # of groups whose rewards teach nothing, in `no_spread_steps` steps in a row
    no_spread_steps: int = 3
    collapse_share: float | None = 0.2  # of other answers than the commonest, compared with the run's first step
    sampler_kl: float | None = 0.05  # between sampler and learner
    base_kl: float | None = 10.0  # between policy and base model, if it is measured
    parse_failure_share: float | None = 0.1  # of answers with a tool call that does not parse
    cut_off_share: float | None = 0.1  # of answers that ended at a limit of tokens

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
        collapse(history, limits.collapse_share) or no_spread(history, limits.no_spread_share, limits.no_spread_steps),
        above(history[-1], "kl/sampler_learner", limits.sampler_kl, "kl", "sampler and learner disagree: do both load "
              "the same base in the same precision?"),
        above(history[-1], "kl/base", limits.base_kl, "kl", "the policy is far from its base: lower the learning rate "
              "or raise kl_coef"),
        above(history[-1], "calls/parse_failure_rate", limits.parse_failure_share, "parse_failures", "tool calls do not "
              "parse: look at the raw answers and the chat template"),
        above(history[-1], "calls/cut_off_rate", limits.cut_off_share, "cut_off", "answers end at the limit of tokens: "
              "raise max_completion_tokens or, if the base never ends a free text, bound it (maxLength, enum); "
              "mask_truncated_completions leaves such rollouts out"),
    ]  # fmt: skip
    return [sign for sign in possible if sign is not None]


def taught_share(step: Metrics) -> float | None:
    """The share of a step's rollouts that were trained with an advantage. The others cost as much and taught nothing."""
    total = step.get("trajectories/total")
    return step.get("trajectories/trained", 0.0) / total if total else None


def groups_without_spread(step: Metrics) -> float:
    """How many groups of a step taught nothing because of their rewards: all equal, or, where good rollouts are imitated,
    all good or none good."""
    return sum(step.get(f"groups/{name}", 0.0) for name in ("no_spread", "all_good", "none_good"))


def no_spread(history: Sequence[Metrics], share: float | None, steps: int) -> Sign | None:
    """A sign if, in each of the last `steps` steps, at least this share of the groups taught nothing because of their
    rewards."""
    last = history[-steps:]
    if share is None or steps < 1 or len(last) < steps:
        return None
    shares = [groups_without_spread(step) / step["groups/total"] if step.get("groups/total") else 0.0 for step in last]
    if min(shares) < share:
        return None
    what = "were all good or had no good rollout" if last[-1].get("groups/no_spread") == 0 else "had equal rewards"
    advice = "If the answers of a group are all alike, raise the temperature or word the choices differently"
    message = f"in {steps} steps almost all groups {what}: {what_to_change(last[-1])}. {advice}"
    return Sign("no_spread", message, shares[-1], share)


def what_to_change(step: Metrics) -> str:
    """The advice for groups whose rewards teach nothing: by whether they are good, or by where equal rewards lie between the
    step's lowest and highest."""
    names = ("groups/no_spread_reward", "reward/min", "reward/max")
    equal, low, high = (step.get(name) for name in names)
    good, bad = step.get("groups/all_good", 0.0), step.get("groups/none_good", 0.0)
    if good != bad:
        solved = good > bad
    elif equal is None or low is None or high is None or low == high:
        return "use scenarios of another difficulty, or partial rewards"
    else:
        solved = equal - low > high - equal
    if solved:
        return "most of these are solved, so use harder scenarios, or the same in new words"
    return "most of these fail, so use easier scenarios, partial rewards or a larger group_size"


TOP = 0.02
"""How far below the run's highest reward the commonest answer may earn and still be right wherever it is given, as a share
of the range of the run's rewards."""


def collapse(history: Sequence[Metrics], share: float | None) -> Sign | None:
    """A sign if the policy has come to give one answer whatever the prompt is, and that answer is not right everywhere.

    What is compared between steps is the share of rollouts with another answer than the commonest of their step: it must
    have fallen to `share` of that of the run's first step. A mean entropy per token is no such measure, as it depends on
    what the answers hold: a policy that writes more of what it is sure of, such as JSON, has less of it. A policy that has
    learned nothing keeps its share, and one that has solved its scenarios gives as many answers as these have."""
    name = "answers/commonest"
    known = [1 - step[name] for step in history if name in step]
    if share is None or len(known) < 2 or name not in history[-1] or known[0] <= 0:
        return None
    limit = known[0] * share
    if known[-1] > limit or _is_right(history):
        return None
    what = f"{1 - known[-1]:.0%} of the rollouts give the same answer, in the run's first step {1 - known[0]:.0%} did"
    return Sign("collapse", f"{what}: {COLLAPSE_ADVICE}", known[-1], limit)


COLLAPSE_ADVICE = (
    "begin again from an earlier checkpoint. If one answer is right in most scenarios, balance them; a lower learning_rate, "
    "fewer minibatches and kl_coef slow it down"
)


def _is_right(history: Sequence[Metrics]) -> bool:
    earned = history[-1].get("answers/commonest_reward")
    low = min((step["reward/min"] for step in history if "reward/min" in step), default=0.0)
    high = max((step["reward/max"] for step in history if "reward/max" in step), default=0.0)
    return earned is not None and high > low and earned >= high - TOP * (high - low)


def above(step: Metrics, name: str, limit: float | None, kind: AlertKind, advice: str) -> Sign | None:
    """A sign if the metric `name` is above its limit. `advice` ends the message."""
    value = step.get(name)
    if value is None or limit is None or not value > limit:
        return None
    return Sign(kind, f"{name} is {value:.4g}, above {limit:g}: {advice}", value, limit)
