"""Summarises the groups of a step: their rewards, and whether the learner can train on them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offbook.base.numbers import distinct, reaches
from offbook.server.records.overview import RolloutRow

MIN_GROUP_SIZE = 2
"""Fewest scored rollouts in a group that is trained, unless the train request has another minimum."""
UNTRAINED = {
    "no_spread": "equal rewards",
    "all_good": "all good",
    "none_good": "none good",
    "dropped_too_few": "too few scored",
    "truncated": "truncated",
    "without_targets": "without a trained call",
}
"""The learner's classes of groups that are not trained, as words."""
_EDGES = (0.1, 0.75, 1.5)  # of the tints, in standard deviations


@dataclass(frozen=True)
class RewardChip:
    """A rollout in its group, with a short name such as R1. `z` is its reward minus the group's mean, in standard
    deviations; `tint`: see `tint`."""

    rollout: RolloutRow
    label: str
    tint: str
    z: float | None


@dataclass(frozen=True)
class GroupLine:
    """A group. `spread` is the population standard deviation of its rewards, 0 if they are equal up to rounding. `why`
    says why it cannot be trained, or ""."""

    group: str | None
    scenario: str | None
    chips: tuple[RewardChip, ...]
    scored: int
    failed: int
    mean: float | None
    spread: float | None
    why: str

    @property
    def learned(self) -> bool:
        """Whether the learner can train on the group."""
        return not self.why


def group_lines(
    rollouts: Iterable[RolloutRow], min_group_size: int = MIN_GROUP_SIZE, min_reward: float | None = None
) -> list[GroupLine]:
    """The groups of these rollouts, sorted by the spread of their rewards, then by failures, both descending.
    `min_reward`: of a step that imitates rollouts from this reward on."""
    groups: dict[str | None, list[RolloutRow]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    lines = [_line(group, members, min_group_size, min_reward) for group, members in groups.items()]
    return sorted(lines, key=lambda line: (-(line.spread or 0.0), -line.failed, line.scenario or "", line.group or ""))


def tint(z: float | None) -> str:
    """The CSS class of a deviation: `p1` to `p3` above the mean, `n1` to `n3` below, "" near it.

    >>> [tint(z) for z in (-2.0, 0.0, 0.5, 1.0)]
    ['n3', '', 'p1', 'p2']
    """
    if z is None or abs(z) < _EDGES[0]:
        return ""
    return ("p" if z > 0 else "n") + str(1 + (abs(z) >= _EDGES[1]) + (abs(z) >= _EDGES[2]))


def _line(group: str | None, members: Sequence[RolloutRow], min_group_size: int, min_reward: float | None) -> GroupLine:
    ordered = sorted(members, key=lambda rollout: (rollout.index is None, rollout.index, rollout.seq))
    rewards = [rollout.reward for rollout in ordered if rollout.reward is not None and not rollout.failed]
    mean = statistics.fmean(rewards) if rewards else None
    spread = None if not rewards else statistics.pstdev(rewards) if len(distinct(rewards)) > 1 else 0.0
    chips: list[RewardChip] = []
    for position, rollout in enumerate(ordered):
        z: float | None = None
        if rollout.reward is not None and not rollout.failed and mean is not None and spread:
            z = (rollout.reward - mean) / spread
        number = 1 + (position if rollout.index is None else rollout.index)
        chips.append(RewardChip(rollout, f"R{number}", tint(z), z))
    return GroupLine(
        group=group,
        scenario=ordered[0].scenario,
        chips=tuple(chips),
        scored=len(rewards),
        failed=sum(rollout.failed for rollout in ordered),
        mean=mean,
        spread=spread,
        why=_why(len(rewards), spread, min_group_size)
        if min_reward is None
        else _why_none_good(rewards, len(ordered), min_reward),
    )


def _why(scored: int, spread: float | None, min_group_size: int) -> str:
    if scored == 0:
        return "none scored"
    if scored < min_group_size:
        return "too few scored"
    return "" if spread else "equal rewards"


def _why_none_good(rewards: Sequence[float], members: int, min_reward: float) -> str:
    if not rewards:
        return "none scored"
    good = sum(reaches(reward, min_reward) for reward in rewards)
    return "none good" if not good else "all good" if good == members > 1 else ""
