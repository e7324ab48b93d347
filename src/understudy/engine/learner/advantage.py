"""Group-relative advantages: plain numbers in, plain numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STD_EPSILON = 1e-6
LARGEST_REWARD = 1e100
"""Sums of squares of larger ones overflow."""
SMALLEST_REST = 1e-9
"""What rounding leaves of a reward without its parts, relative to the largest part."""


@dataclass(frozen=True)
class Advantages:
    """`values[g][i]` belongs to rollout i of group g; None: it trains nothing (unscored, dropped, or no spread).

    `by_call[g][i][k]` belongs to the calls of rollout i before which k of its call rewards were earned; None unless the
    advantages are per call. `values` has those of the first calls then."""

    values: tuple[tuple[float | None, ...], ...]
    too_few: int  # groups with fewer scored rollouts than min_group_size
    no_spread: int  # groups whose scored rollouts all have the same reward
    by_call: tuple[tuple[tuple[float, ...] | None, ...], ...] | None = None

    @property
    def of_calls(self) -> tuple[tuple[tuple[float, ...] | None, ...], ...]:
        """`by_call`, or the one advantage of each rollout."""
        if self.by_call is not None:
            return self.by_call
        return tuple(tuple(None if value is None else (value,) for value in group) for group in self.values)

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
        scored = _scored(g, group)
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


def call_advantages(
    rewards: Sequence[Sequence[float | None]],
    call_rewards: Sequence[Sequence[Sequence[float]]],
    *,
    min_group_size: int,
    divide_by_std: bool,
) -> Advantages:
    """Advantages per call, from the parts of a rollout's reward that were earned after its calls.

    Process supervision of GRPO (2402.03300, section 4.1.3): all parts of a group are normalised together, and a call's
    advantage is the sum of the normalised parts that were earned after it. What is left of a reward without its
    `call_rewards[g][i]` is one part more, earned at the end, where any rollout of the group has such a rest. Raises
    ValueError as `group_advantages` does.

    Two rollouts with the rewards 1 and 3, of which 1 and (1, 2) were earned after calls: the parts are 1 | 1, 2, their
    mean is 4/3, and undivided the advantages are -1/3 | 1/3 for the first calls, 2/3 for the calls after the first part.
    """
    values: list[tuple[float | None, ...]] = []
    by_call: list[tuple[tuple[float, ...] | None, ...]] = []
    too_few = no_spread = 0
    for g, (group, earned) in enumerate(zip(rewards, call_rewards, strict=True)):
        scored = _scored(g, group)
        parts = _parts(group, earned)
        every = [part for rollout in parts if rollout is not None for part in rollout]
        to_go: tuple[tuple[float, ...] | None, ...] = (None,) * len(group)
        if len(scored) < min_group_size:
            too_few += 1
        elif not every or min(every) == max(every):
            no_spread += 1
        else:
            mean, scale = _moments(every, divide_by_std)
            to_go = tuple(
                None if part is None else _sums_to_go([(reward - mean) / scale for reward in part], len(own) + 1)
                for part, own in zip(parts, earned, strict=True)
            )
        by_call.append(to_go)
        values.append(tuple(None if sums is None else sums[0] for sums in to_go))
    return Advantages(tuple(values), too_few, no_spread, tuple(by_call))


def _parts(group: Sequence[float | None], earned: Sequence[Sequence[float]]) -> list[list[float] | None]:
    """The parts of each scored reward in the order in which they were earned."""
    rests = [None if reward is None else reward - math.fsum(own) for reward, own in zip(group, earned, strict=True)]
    at_the_end = any(
        rest is not None and (not own or abs(rest) > SMALLEST_REST * max(1.0, *map(abs, own)))
        for rest, own in zip(rests, earned, strict=True)
    )
    return [
        None if rest is None else [*own, *([rest] if at_the_end else [])]
        for rest, own in zip(rests, earned, strict=True)
    ]


def _sums_to_go(parts: Sequence[float], count: int) -> tuple[float, ...]:
    return tuple(math.fsum(parts[k:]) for k in range(count))


def _scored(g: int, group: Sequence[float | None]) -> list[float]:
    scored = [reward for reward in group if reward is not None]
    if not all(map(math.isfinite, scored)):
        raise ValueError(f"group {g}: rewards must be finite numbers or None (unscored), got {list(group)!r}")
    if max(map(abs, scored), default=0.0) > LARGEST_REWARD:
        raise ValueError(
            f"group {g}: rewards beyond +-{LARGEST_REWARD:g} overflow in the advantages, got {list(group)!r}: "
            "scale them down"
        )
    return scored


def _advantages(
    group: Sequence[float | None], scored: Sequence[float], divide_by_std: bool
) -> tuple[float | None, ...]:
    mean, scale = _moments(scored, divide_by_std)
    return tuple(None if reward is None else (reward - mean) / scale for reward in group)


def _moments(rewards: Sequence[float], divide_by_std: bool) -> tuple[float, float]:
    """The mean, and what deviations from it are divided by."""
    mean = math.fsum(rewards) / len(rewards)
    if not divide_by_std:
        return mean, 1.0
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)) + STD_EPSILON
