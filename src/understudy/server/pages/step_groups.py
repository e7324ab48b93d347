"""The groups of a step: their rewards, and what could be learned from each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..records.overview import RolloutRow

MIN_GROUP_SIZE = 2
_EDGES = (0.1, 0.75, 1.5)


@dataclass(frozen=True)
class RewardChip:
    """A rollout in its group. `tint`: `p1` to `p3` above the group's mean, `n1` to `n3` below, "" at it; `z` in standard
    deviations of the group."""

    rollout: RolloutRow
    tint: str
    z: float | None


@dataclass(frozen=True)
class GroupLine:
    """`spread` is the population's standard deviation of the scored rewards; `why` says what kept the group from being
    learned from, "" where nothing did."""

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
        return not self.why


def group_lines(rollouts: Iterable[RolloutRow], min_group_size: int = MIN_GROUP_SIZE) -> list[GroupLine]:
    """The groups, those with the widest spread of rewards first, then those with failures."""
    groups: dict[str | None, list[RolloutRow]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    lines = [_line(group, members, min_group_size) for group, members in groups.items()]
    return sorted(lines, key=lambda line: (-(line.spread or 0.0), -line.failed, line.scenario or "", line.group or ""))


def tint(z: float | None) -> str:
    """The bin of a deviation."""
    if z is None or abs(z) < _EDGES[0]:
        return ""
    return ("p" if z > 0 else "n") + str(1 + (abs(z) >= _EDGES[1]) + (abs(z) >= _EDGES[2]))


def _line(group: str | None, members: Sequence[RolloutRow], min_group_size: int) -> GroupLine:
    ordered = sorted(members, key=lambda rollout: (rollout.index is None, rollout.index, rollout.seq))
    rewards = [rollout.reward for rollout in ordered if rollout.reward is not None and not rollout.failed]
    mean = statistics.fmean(rewards) if rewards else None
    spread = statistics.pstdev(rewards) if rewards else None
    chips: list[RewardChip] = []
    for rollout in ordered:
        z: float | None = None
        if rollout.reward is not None and not rollout.failed and mean is not None and spread:
            z = (rollout.reward - mean) / spread
        chips.append(RewardChip(rollout, tint(z), z))
    return GroupLine(
        group=group,
        scenario=ordered[0].scenario,
        chips=tuple(chips),
        scored=len(rewards),
        failed=sum(rollout.failed for rollout in ordered),
        mean=mean,
        spread=spread,
        why=_why(len(rewards), spread, min_group_size),
    )


def _why(scored: int, spread: float | None, min_group_size: int) -> str:
    if scored == 0:
        return "none scored"
    if scored < min_group_size:
        return "too few scored"
    return "" if spread else "equal rewards"
