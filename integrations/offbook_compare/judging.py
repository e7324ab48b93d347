"""Shows a judge the rollouts of all candidates of a scenario as one group, without names and in random order, and counts who
wins."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbook.base.choices import as_message
from offbook.base.types import (
    History,
    Message,
    RolloutPlace,
    Trajectory,
    TrajectoryGroup,
    new_id,
)
from offbook.contracts import Judge
from offbook.trainer.evaluate import Interval, bootstrap_mean, mean
from offbook.trainer.judging import DROPPED, judged, nothing_scored

from .journal import ComparedRollout


@dataclass(frozen=True)
class JudgedRollout:
    """One candidate's rollout in a judged group: its score, and the length of its messages in characters."""

    score: float
    length: int


JudgedGroup = Mapping[str, JudgedRollout]
"""The judged rollouts of one scenario, by candidate."""


@dataclass(frozen=True)
class WinRate:
    """How often a candidate beat the baseline; a tie counts half. `longer`: share of pairs in which the candidate wrote more."""

    candidate: str
    against: str
    scenarios: int
    rate: Interval
    ties: float
    longer: float


def win_rate(
    groups: Sequence[tuple[str, JudgedGroup]], candidate: str, against: str, *, seed: int = 0
) -> WinRate | None:
    """The win rate over the groups (scenario, rollouts) that have both candidates; None if there is none.

    The interval is over scenarios, since the groups of one scenario are not independent.
    """
    pairs = [(name, group[candidate], group[against]) for name, group in groups if {candidate, against} <= group.keys()]
    if not pairs:
        return None
    wins: dict[str, list[float]] = {}
    for name, own, other in pairs:
        wins.setdefault(name, []).append(_share(own.score, other.score))
    means = [mean(values) for values in wins.values()]
    return WinRate(
        candidate=candidate,
        against=against,
        scenarios=len(means),
        rate=bootstrap_mean(means, seed=seed),
        ties=mean([float(own.score == other.score) for _, own, other in pairs]),
        longer=mean([_share(own.length, other.length) for _, own, other in pairs]),
    )


def _share(own: float, other: float) -> float:
    return 0.5 if own == other else float(own > other)


async def judge_side_by_side(
    rollouts: Mapping[str, Sequence[ComparedRollout]], judge: Judge, seed: int = 0
) -> tuple[list[tuple[str, JudgedGroup]], int]:
    """Judge one group per scenario and rollout index of the candidates' `rollouts`. Failed ones are left out.

    Returns the judged groups with their scenarios, and the number of groups that the judge dropped. Raises the errors of
    `judged`, and RolloutError if no group was scored.
    """
    generator = random.Random(seed)
    attempts: dict[tuple[str, int], list[tuple[str, Trajectory]]] = {}
    for name, rows in rollouts.items():
        for row in rows:
            if not row.failed:
                attempts.setdefault((row.scenario, row.index), []).append((name, blind(row.trajectory)))
    shown_groups: list[tuple[str, dict[str, str], TrajectoryGroup]] = []
    for (scenario, _), shown in attempts.items():
        if len(shown) < 2:
            continue
        generator.shuffle(shown)
        place = RolloutPlace(scenario=scenario, group=new_id("group"))
        owners = {trajectory.id: name for name, trajectory in shown}
        shown_groups.append((scenario, owners, TrajectoryGroup([item for _, item in shown], place=place)))
    answers = await judged([group for _, _, group in shown_groups], judge)
    judged_groups: list[tuple[str, JudgedGroup]] = []
    for (scenario, owners, _), answer in zip(shown_groups, answers, strict=True):
        if answer.metrics.get(DROPPED):
            continue
        scores = {
            owners[item.id]: JudgedRollout(float(item.reward), written(item))
            for item in answer
            if item.reward is not None and item.id in owners
        }
        judged_groups.append((scenario, scores))
    if shown_groups and not judged_groups:
        raise nothing_scored(answers)
    return judged_groups, len(shown_groups) - len(judged_groups)


def blind(trajectory: Trajectory) -> Trajectory:
    """A copy of the trajectory for the judge: the conversations, without anything that identifies the candidate."""
    histories = [_blind(history) for history in (trajectory, *trajectory.additional_histories)]
    first = histories[0]
    return Trajectory(
        messages_and_choices=first.messages_and_choices, tools=first.tools, additional_histories=histories[1:]
    )


def _blind(history: History) -> History:
    """The history as plain messages: choices of the trained model carry a mark that those of other LLMs lack."""
    plain: list[Message] = [dict(as_message(item)) for item in history.entries()]
    for message in plain:
        message.pop("name", None)
    return History(messages_and_choices=list(plain), tools=history.tools)


def written(trajectory: Trajectory) -> int:
    """Number of characters in all assistant messages."""
    messages = [as_message(item) for item in trajectory.entries()]
    texts = [message.get("content") for message in messages if message["role"] == "assistant"]
    return sum(len(text) for text in texts if isinstance(text, str))
