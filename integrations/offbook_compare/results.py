"""The results of a comparison, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from offbook.base.types import Json, Message
from offbook.trainer.evaluate import Evaluation, Interval, mean, mean_reward, measured, paired_difference

from .candidates import Candidate
from .journal import ComparedRollout, MeasuredCall, call_totals
from .judging import JudgedGroup, WinRate

HOUR = 3600.0
JUDGED = "judge's score"
"""The measure of a comparison without rewards: the judge's score from 0 to 1, given side by side."""


@dataclass(frozen=True)
class CandidateResult:
    """The numbers of one candidate; None means unknown.

    Tokens, calls and cost (USD) are means over all rollouts, including failed ones, which were paid for too. `latency` is the
    50th and 95th percentile of a call's seconds. `difference` is the difference to
    the baseline on the scenarios that both have.
    """

    name: str
    trained: bool
    step: int | None
    scenarios: int
    rollouts: int
    failed: int
    value: Interval | None
    difference: Interval | None
    passes: Mapping[int, float]
    reward: float | None
    calls: float
    prompt_tokens: float | None
    completion_tokens: float | None
    latency: tuple[float, float] | None
    cost: float | None


@dataclass(frozen=True)
class DifferingSample:
    """A scenario with different results: the value and the last message of every candidate."""

    scenario: str
    text: str
    values: Mapping[str, float | None]
    answers: Mapping[str, str]


@dataclass(frozen=True)
class ComparisonReport:
    """The result of a comparison, with the candidates in order, including the baseline.

    `measure` is what the candidates' `value` means: success, reward, or the judge's score if only a judge compared them; None if
    nothing was scored. `warnings` state the limits of the comparison.
    """

    run: str
    measure: str | None
    baseline: str
    candidates: tuple[CandidateResult, ...]
    win_rates: tuple[WinRate, ...] = ()
    samples: tuple[DifferingSample, ...] = ()
    warnings: tuple[str, ...] = ()
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])
    spending: tuple[str, ...] = ()

    def of(self, name: str) -> CandidateResult:
        """The result of a candidate. Raises KeyError."""
        for result in self.candidates:
            if result.name == name:
                return result
        raise KeyError(f"{name!r}: the candidates are {', '.join(result.name for result in self.candidates)}")


@dataclass(frozen=True)
class Scored:
    """A candidate's rollouts with their evaluation."""

    candidate: Candidate
    rows: Sequence[ComparedRollout]
    evaluation: Evaluation

    @property
    def failed(self) -> int:
        """Number of rollouts that ended with an exception. A rollout without a reward yet has not failed."""
        return sum(row.failed for row in self.rows)

    def as_metrics(self) -> dict[str, float]:
        """The evaluation's metrics for `model.log`."""
        return self.evaluation.as_metrics() | {"failed": float(self.failed)}


def candidate_result(
    scored: Scored,
    values: Mapping[str, float],
    baseline: Mapping[str, float] | None,
    *,
    success_at: float | None,
    gpu_price: float | None,
) -> CandidateResult:
    """Compute the numbers of one candidate.

    `values` and `baseline` have the measure by scenario; `baseline` is None for the baseline itself. `gpu_price` is in USD
    per hour.
    """
    rows, evaluation, candidate = scored.rows, scored.evaluation, scored.candidate
    calls = [call for row in rows for call in row.calls]
    per_rollout = {name: total / len(rows) for name, total in call_totals(calls).items()}
    if candidate.trained:  # a local model costs the time for which its machine was busy
        cost = None if gpu_price is None else busy_seconds(calls) * gpu_price / HOUR / len(rows)
    else:
        cost = per_rollout.get("cost")
    shared = baseline is not None and values.keys() & baseline.keys()
    return CandidateResult(
        name=candidate.name,
        trained=candidate.trained,
        step=candidate.step,
        scenarios=evaluation.scenarios,
        rollouts=len(rows),
        failed=scored.failed,
        value=mean_reward(list(values.values())) if values else None,
        difference=paired_difference(dict(values), dict(baseline or {})) if shared else None,
        passes=_passes(evaluation, success_at),
        reward=evaluation.reward,
        calls=per_rollout["calls"],
        prompt_tokens=per_rollout.get("prompt_tokens"),
        completion_tokens=per_rollout.get("completion_tokens"),
        latency=percentiles([call.seconds for call in calls]),
        cost=cost,
    )


def scenario_values(scored: Sequence[Scored], success_at: float | None) -> tuple[str | None, list[dict[str, float]]]:
    """The measure of the comparison, and every candidate's mean of it by scenario.

    The measure is success if every scored candidate reports it, else the reward; None if nothing was scored.
    """
    measurements = [measured(item.evaluation, success_at) for item in scored]
    names = {name for name, values in measurements if values}
    if not names:
        return None, [{} for _ in scored]
    if names == {"success"}:
        return "success", [values if name == "success" else {} for name, values in measurements]
    return "reward", [item.evaluation.rewards() for item in scored]


def judged_values(groups: Sequence[tuple[str, JudgedGroup]], candidate: str) -> dict[str, float]:
    """The candidate's mean score by scenario, from a judge that saw all candidates' rollouts side by side."""
    scores: dict[str, list[float]] = {}
    for scenario, group in groups:
        if candidate in group:
            scores.setdefault(scenario, []).append(group[candidate].score)
    return {scenario: mean(own) for scenario, own in scores.items()}


def busy_seconds(calls: Sequence[MeasuredCall]) -> float:
    """Seconds during which at least one of the calls was running."""
    busy, end = 0.0, float("-inf")
    for call in sorted(calls, key=lambda call: call.started_at):
        last = call.started_at + call.seconds
        busy += max(0.0, last - max(call.started_at, end))
        end = max(end, last)
    return busy


def percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    """The 50th and 95th percentile; None without values."""
    if not values:
        return None
    half, most = np.percentile(values, [50, 95])
    return float(half), float(most)


def _passes(evaluation: Evaluation, success_at: float | None) -> dict[int, float]:
    """pass@1 and pass@k, where k is the smallest number of rollouts per scenario; empty for k = 1 or without successes."""
    counts = [len(score.succeeded(success_at)) for score in evaluation.scores]
    least = min((count for count in counts if count), default=0)
    return {k: evaluation.pass_at(k, success_at) for k in dict.fromkeys((1, least)) if k} if least > 1 else {}


def differing_samples(
    scored: Sequence[Scored], texts: Mapping[str, str], values: Sequence[Mapping[str, float]], limit: int
) -> tuple[DifferingSample, ...]:
    """The scenarios with the largest spread of values between candidates, at most `limit`."""
    samples: list[tuple[float, DifferingSample]] = []
    for name, text in texts.items():
        earned = {item.candidate.name: own.get(name) for item, own in zip(scored, values, strict=True)}
        known = [value for value in earned.values() if value is not None]
        spread = max(known) - min(known) if known else 0.0
        if spread > 0:
            answers = {item.candidate.name: _answer(item.rows, name) for item in scored}
            samples.append((spread, DifferingSample(name, text, earned, answers)))
    samples.sort(key=lambda item: -item[0])
    return tuple(sample for _, sample in samples[:limit])


def _answer(rows: Sequence[ComparedRollout], scenario: str) -> str:
    """The last assistant message of the scenario's first rollout, or its error."""
    row = next((row for row in rows if row.scenario == scenario), None)
    if row is None:
        return ""
    if row.error is not None:
        return row.error
    messages: list[Message] = [dict(message) for message in row.trajectory.messages()]
    last = next((message for message in reversed(messages) if message["role"] == "assistant"), Message())
    calls: list[Json] = [call["function"] for call in last.get("tool_calls") or ()]
    text = str(last.get("content") or "")
    return " ".join(filter(None, (text, *(f"(calls {call['name']}({call['arguments']}))" for call in calls))))
