"""Group-relative advantages: plain numbers in, plain numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STD_EPSILON = 1e-6
LARGEST_REWARD = 1e100
"""Sums of squares of larger ones overflow."""


@dataclass(frozen=True)
class Advantages:
    """`values[g][i]` belongs to rollout i of group g; None: it trains nothing (unscored, dropped, or no spread)."""

    values: tuple[tuple[float | None, ...], ...]
    too_few: int  # groups with fewer scored rollouts than min_group_size
    no_spread: int  # groups whose scored rollouts all have the same reward

    @property
    def trained_groups(self) -> int:
        return len(self.values) - self.too_few - self.no_spread


def group_advantages(
    rewards: Sequence[Sequence[float | None]], *, min_group_size: int, divide_by_std: bool
) -> Advantages:
    """Reward minus the mean of the group's scored rollouts, divided by their population standard deviation + 1e-6
    if asked (GRPO 2402.03300, section 4.1.2; undivided: Dr. GRPO 2503.20783, section 3.2). None is unscored: it is
    neither 0 nor part of the mean. Raises ValueError for a reward that is not finite or beyond `LARGEST_REWARD`."""
    values: list[tuple[float | None, ...]] = []
    too_few = no_spread = 0
    for g, group in enumerate(rewards):
        scored = [reward for reward in group if reward is not None]
        if not all(map(math.isfinite, scored)):
            raise ValueError(f"group {g}: rewards must be finite numbers or None (unscored), got {list(group)!r}")
        if max(map(abs, scored), default=0.0) > LARGEST_REWARD:
            raise ValueError(
                f"group {g}: rewards beyond +-{LARGEST_REWARD:g} overflow in the advantages, got {list(group)!r}: "
                "scale them down"
            )
        nothing: tuple[None, ...] = (None,) * len(group)
        if len(scored) < min_group_size:
            too_few += 1
            values.append(nothing)
        elif min(scored) == max(scored):
            no_spread += 1
            values.append(nothing)
        else:
            values.append(_advantages(group, scored, divide_by_std))
    return Advantages(tuple(values), too_few, no_spread)


def _advantages(
    group: Sequence[float | None], scored: Sequence[float], divide_by_std: bool
) -> tuple[float | None, ...]:
    mean = math.fsum(scored) / len(scored)
    scale = 1.0
    if divide_by_std:
        scale = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / len(scored)) + STD_EPSILON
    return tuple(None if reward is None else (reward - mean) / scale for reward in group)
