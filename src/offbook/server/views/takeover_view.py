"""A route's takeover as its page shows it: facts, stages, and the test's intervals as bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from offbook.base.takeovers import SHADOW, Decision, Numbers, StageNeeds, Status, TakeoverState, Verdict, share_text

from ..upstream.counts import RouteCounts
from .numbers import DASH, number
from .run_summary import Fact, RunStatus

ACTIVE: tuple[Status, ...] = ("running", "waiting", "taken_over")
_STATUS: dict[Status, RunStatus] = {
    "none": RunStatus("quiet", DASH, "no takeover"),
    "running": RunStatus("active", "●", "running"),
    "waiting": RunStatus("active", "○", "waits for approval"),
    "taken_over": RunStatus("done", "✓", "taken over"),
    "left": RunStatus("failed", "✕", "left"),
    "stopped": RunStatus("quiet", DASH, "stopped"),
}
_VERDICT: dict[Verdict, RunStatus] = {
    "started": RunStatus("active", "●", "started"),
    "passed": RunStatus("done", "✓", "passed"),
    "approved": RunStatus("done", "✓", "approved"),
    "taken_over": _STATUS["taken_over"],
    "left": _STATUS["left"],
    "stopped": _STATUS["stopped"],
    "round": RunStatus("quiet", "↻", "new round"),
}
_NOT_BEGUN = RunStatus("quiet", DASH, "not begun")


@dataclass(frozen=True)
class StageLine:
    """A stage of the present takeover with the threads that began in it. `numbers`: of now, or of its last decision; None
    before."""

    needs: StageNeeds
    status: RunStatus
    small: int
    paid: int
    numbers: Numbers | None


@dataclass(frozen=True)
class DecisionLine:
    """A decision, or with `decided_at=None` the state of now. `limit`: what the test compares its interval with, negative for
    the margin of a difference; None for a decision of an earlier takeover, whose plan is not kept."""

    decided_at: float | None
    share: float
    status: RunStatus
    reason: str
    numbers: Numbers | None
    limit: float | None

    @property
    def mean(self) -> float | None:
        """The difference of the mean scores, or in shadow the agreement."""
        score = None if self.numbers is None else self.numbers.score
        if self.numbers is None or score is None or self.share == SHADOW:
            return score
        return None if self.numbers.reference_score is None else score - self.numbers.reference_score


@dataclass(frozen=True)
class Intervals:
    """Intervals of one scale from `low` to `high`. Places of the drawing are percentages of its width."""

    title: str
    lines: tuple[DecisionLine, ...]
    low: float
    high: float

    def place(self, value: float) -> float:
        """Where a value is drawn."""
        return round(100 * (value - self.low) / (self.high - self.low), 2)


def takeover_status(state: TakeoverState) -> RunStatus:
    """The status of a takeover."""
    return _STATUS[state.status]


def small_models_part(state: TakeoverState) -> str:
    """What the small model answers now."""
    if state.status not in ACTIVE:
        return "no thread"
    return "all threads, unseen" if state.share == SHADOW else f"{share_text(state.share)} of threads"


def present(decisions: Sequence[Decision]) -> int:
    """The index of the decision that began the present takeover: the last start of a first stage."""
    return max((at for at, each in enumerate(decisions) if each.verdict == "started" and each.stage == 0), default=0)


def decision_lines(state: TakeoverState) -> list[DecisionLine]:
    """Every decision, newest first."""
    began = present(state.decisions)
    lines = [
        DecisionLine(
            each.decided_at,
            each.share,
            _VERDICT[each.verdict],
            each.reason,
            None if each.verdict == "started" else each.numbers,
            _limit(state, each.share) if at >= began else None,
        )
        for at, each in enumerate(state.decisions)
    ]
    return lines[::-1]


def now_line(state: TakeoverState) -> DecisionLine | None:
    """The evidence of the stage that runs; None without one, or where its numbers are not known."""
    if state.status not in ACTIVE or state.numbers.lower is None:
        return None
    limit = _limit(state, state.share)
    return DecisionLine(None, state.share, RunStatus("active", "●", "now"), "", state.numbers, limit)


def _limit(state: TakeoverState, share: float) -> float:
    return state.plan.min_agreement if share == SHADOW else -state.plan.margin


def intervals(lines: Iterable[DecisionLine]) -> list[Intervals]:
    """The intervals of decisions as drawings: differences of scores, and agreement in shadow."""
    drawn = [line for line in lines if line.numbers is not None and line.numbers.lower is not None]
    live = tuple(line for line in drawn if line.share != SHADOW)
    shadow = tuple(line for line in drawn if line.share == SHADOW)
    found: list[Intervals] = []
    if live:
        ends = [0.0, *(line.limit for line in live if line.limit is not None)]
        for line in live:
            if line.numbers is not None:
                ends += [end for end in (line.numbers.lower, line.numbers.upper) if end is not None]
        low, high = min(ends), max(ends)
        room = 0.03 * (high - low) or 1.0
        found.append(Intervals("Score of the small model minus that of the paid one", live, low - room, high + room))
    if shadow:
        found.append(Intervals("Agreement in shadow", shadow, 0.0, 1.0))
    return found


def stage_lines(state: TakeoverState, threads: Mapping[tuple[int, bool], int]) -> list[StageLine]:
    """The stages of the present takeover. `threads`: their numbers by stage and whether the small model answers them."""
    lines: list[StageLine] = []
    decisions = state.decisions[present(state.decisions) :]
    for stage, needs in enumerate(state.needs):
        last = next((each for each in reversed(decisions) if each.stage == stage), None)
        numbers = last.numbers if last is not None and last.verdict != "started" else None
        status = _VERDICT[last.verdict] if last is not None else _NOT_BEGUN
        if stage == state.stage and state.status in ACTIVE:
            status = _STATUS[state.status]
            numbers = state.numbers if state.numbers.lower is not None else numbers
        lines.append(StageLine(needs, status, threads.get((stage, True), 0), threads.get((stage, False), 0), numbers))
    return lines


def small_calls(state: TakeoverState) -> int:
    """Calls that the small model answered, in all takeovers: those of each stage when it ended, without the failed ones.

    A restart of the server begins the counts of a stage anew, so there may have been more.
    """
    total, stage = 0, 0
    for each in state.decisions:
        if each.share == SHADOW:
            continue
        if each.verdict in ("started", "round"):
            total, stage = total + max(stage, _answered(each.numbers)), 0
        else:
            stage = max(stage, _answered(each.numbers))
    if state.status in ACTIVE and state.share != SHADOW:
        stage = max(stage, _answered(state.numbers))
    return total + stage


def _answered(numbers: Numbers) -> int:
    return numbers.calls - sum(numbers.failed.values())


def paid_per_call(counts: RouteCounts) -> float | None:
    """The mean USD of the paid model's calls whose price is known; None without such."""
    priced = counts.calls - counts.uncounted - counts.unpriced
    return counts.cost / priced if counts.cost and priced > 0 else None


def takeover_facts(state: TakeoverState, counts: RouteCounts, threads: Mapping[tuple[int, bool], int]) -> list[Fact]:
    """Stage, share, threads and calls of each side, what was paid, and an estimate of what was saved."""
    answered, mean = small_calls(state), paid_per_call(counts)
    by_side = {side: sum(number for (_, small), number in threads.items() if small == side) for side in (True, False)}
    of_takeover: list[Fact] = []
    saved: list[Fact] = []
    if state.status != "none":
        stage = f"{state.stage + 1} of {len(state.plan.stages)}"
        answers = share_text(state.share) if state.status in ACTIVE else "0 %"
        of_takeover = [
            Fact("Stage", stage, share_text(state.plan.stages[state.stage])),
            Fact("Small model has", answers, "of threads, now"),
            Fact("Threads", f"{number(by_side[True])} small", f"{number(by_side[False])} paid, in this takeover"),
            Fact("Small model's calls", number(answered), "answered"),
        ]
        saved = [Fact("Saved", DASH if mean is None else f"≈ {number(answered * mean)} USD", "an estimate")]
    price = "no known price" if mean is None else f"{number(1000 * mean)} USD per 1,000 calls"
    return [
        *of_takeover,
        Fact("Paid model's calls", number(counts.calls), f"{number(counts.failed)} failed"),
        Fact("Paid", f"{number(counts.cost)} USD", price),
        *saved,
    ]
