"""One stage of a takeover: its evidence, its guards, and what they say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from offbook.base.takeovers import SHADOW, Numbers, StageNeeds, TakeoverPlan

from .evidence import MeanBets, SequentialComparison, threads_needed

GUARD_GAP = 0.1
"""A guard's share that is higher than its limit by this much is found soonest."""
COST_CALLS = 100
"""Calls of each side from which on their costs are compared: a mean cost is a sum, and no estimate."""
SHADOW_VARIANCE = 0.09


class Sums(NamedTuple):
    """Calls with a known cost, and their USD."""

    calls: int = 0
    cost: float = 0.0

    def plus(self, cost: float) -> Sums:
        """With one more call."""
        return Sums(self.calls + 1, self.cost + cost)

    @property
    def mean(self) -> float | None:
        """USD per call; None without calls."""
        return self.cost / self.calls if self.calls else None


class Finding(NamedTuple):
    """What a stage's evidence says: whether the small model is good enough, None if its threads ended before that was shown;
    and why."""

    passed: bool | None
    reason: str


def needs_of(plan: TakeoverPlan) -> tuple[StageNeeds, ...]:
    """The scored threads that each stage of a plan needs."""
    width = plan.highest - plan.lowest
    mean = min(0.95, max(0.05, plan.scaled(plan.expected)))  # at the ends, a variance of 0 would plan for certainty
    needs: list[StageNeeds] = []
    for share in plan.stages:
        if share == SHADOW:
            usual, most = threads_needed(GUARD_GAP, SHADOW, SHADOW_VARIANCE)
        else:
            usual, most = threads_needed(plan.margin / width, compared(plan, share), mean * (1 - mean))
        most = plan.threads or most
        usual = min(usual, most)
        traffic = most if share == SHADOW else round(most / share)
        needs.append(StageNeeds(share=share, usual=usual, most=most, traffic=traffic))
    return tuple(needs)


def compared(plan: TakeoverPlan, share: float) -> float:
    """The small model's share of the threads whose scores are compared: with all threads, that of the stage before."""
    return plan.stages[-2] if share == 1.0 else share


@dataclass
class Stage:
    """The evidence of a stage with this share of threads, for at most so many of the small model's; later stages of a share of 1
    get the `reference` of the one before."""

    plan: TakeoverPlan
    share: float
    most: int
    reference: MeanBets | None = None
    failed: Counter[str] = field(default_factory=Counter[str])
    slow: int = 0
    unlike: Counter[str] = field(default_factory=Counter[str])
    results: int = 0
    tool_errors: int = 0
    out_of_range: int = 0
    calls: int = 0
    shadowed: set[str] = field(default_factory=set[str])
    small_cost: Sums = field(default_factory=Sums)
    paid_cost: Sums = field(default_factory=Sums)

    def __post_init__(self) -> None:
        margin = self.plan.margin / (self.plan.highest - self.plan.lowest)
        self.comparison = SequentialComparison(margin, compared(self.plan, self.share), self.plan.alpha)
        if self.reference is not None:
            self.comparison.reference = self.reference
        self.agreement = MeanBets(GUARD_GAP)
        self._guards = {name: MeanBets(GUARD_GAP) for name in ("errors", "slow", "unknown", "tools")}

    def add_score(self, score: float, *, small: bool) -> None:
        """Take in the first score of a thread that began in this stage."""
        self.comparison.add(self.plan.scaled(score), tested=small)

    def add_call(self, seconds: float, failure: str | None) -> None:
        """Take in a call for which the small model was asked."""
        self.calls += 1
        slow = failure is None and seconds > self.plan.slow_seconds
        self.slow += slow
        if failure is not None:
            self.failed[failure] += 1
        self._guards["errors"].add(float(failure is not None))
        self._guards["slow"].add(float(slow))
        self._guards["unknown"].add(0.0)

    def add_unlike(self, how: str) -> None:
        """Take in a call unlike those that were seen, for which the small model was not asked."""
        self.unlike[how] += 1
        self._guards["unknown"].add(1.0)

    def add_result(self, *, failed: bool) -> None:
        """Take in the result of a tool of the app."""
        self.results += 1
        self.tool_errors += failed
        self._guards["tools"].add(float(failed))

    def add_small_cost(self, cost: float | None) -> None:
        """Take in what a call on the small model's side cost in USD, whoever answered in the end."""
        if cost is not None:
            self.small_cost = self.small_cost.plus(cost)

    def add_paid_cost(self, cost: float | None) -> None:
        """Take in what a call on the paid model's side cost."""
        if cost is not None:
            self.paid_cost = self.paid_cost.plus(cost)

    def finding(self) -> Finding | None:
        """What the evidence says by now; None: nothing yet."""
        return self._guarded() or (self._shadow() if self.share == SHADOW else self._live())

    def _guarded(self) -> Finding | None:
        plan = self.plan
        for name, what, most in (
            ("errors", "guard: failed calls", plan.max_errors),
            ("slow", f"guard: calls slower than {plan.slow_seconds:g} s", plan.max_slow),
            ("tools", "guard: failed results of the app's tools", plan.max_tool_errors),
            ("unknown", "drift: calls unlike those that were seen", plan.max_unknown),
        ):
            if self._guards[name].above_level(most, plan.alpha):
                how = f" ({', '.join(kind for kind, _ in self.unlike.most_common())})" if name == "unknown" else ""
                return Finding(False, f"{what}{how}: more than {most:.0%}")
        small, paid = self.small_cost, self.paid_cost
        if min(small.calls, paid.calls) >= COST_CALLS and (small.mean or 0.0) > (paid.mean or 0.0):
            return Finding(False, f"guard: {small.mean:.6f} USD per call, and the paid model costs {paid.mean:.6f}")
        return None

    def _shadow(self) -> Finding | None:
        plan = self.plan
        if self.agreement.above_level(plan.min_agreement, plan.alpha):
            return Finding(True, f"the answers agree by more than {plan.min_agreement:g}")
        if self.agreement.below_level(plan.min_agreement, plan.alpha):
            return Finding(False, f"the answers agree by less than {plan.min_agreement:g}")
        return self._used_up(self.agreement.count)

    def _live(self) -> Finding | None:
        if self.comparison.worse():
            return Finding(False, f"worse by more than {self.plan.margin:g}")
        if self.comparison.not_worse():
            return Finding(True, f"worse by less than {self.plan.margin:g}, if at all")
        return self._used_up(self.comparison.tested.count)

    def _used_up(self, count: int) -> Finding | None:
        return Finding(None, f"not shown within {self.most} threads") if count >= self.most else None

    def numbers(self) -> Numbers:
        """The stage in numbers."""
        plan, width = self.plan, self.plan.highest - self.plan.lowest
        tested, reference = self.comparison.tested, self.comparison.reference
        if self.share == SHADOW:
            tested, reference = self.agreement, MeanBets(GUARD_GAP)
            width, bounds = 1.0, self.agreement.bounds(plan.alpha)
            low = 0.0
        else:
            bounds = self.comparison.bounds()
            low = plan.lowest
        return Numbers(
            tested=tested.count,
            reference=reference.count,
            score=low + width * float(tested.mean) if tested.count else None,
            reference_score=low + width * float(reference.mean) if reference.count else None,
            lower=width * bounds[0],
            upper=width * bounds[1],
            calls=self.calls,
            failed=dict(self.failed),
            slow=self.slow,
            results=self.results,
            tool_errors=self.tool_errors,
            unknown=self.unlike.total(),
            out_of_range=self.out_of_range,
            cost=self.small_cost.mean,
            reference_cost=self.paid_cost.mean,
        )
