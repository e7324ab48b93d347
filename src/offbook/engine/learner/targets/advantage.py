"""Group-relative advantages: a rollout's reward compared with the rewards of its group. Plain numbers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offbook.base.rounding import RELATIVE, distinct, rounding

STD_EPSILON = 1e-6
LARGEST_REWARD = 1e100
"""Larger rewards are rejected: their sums of squares could overflow."""


@dataclass(frozen=True)
class Advantages:
    """The advantages of a step. `values[g][i]` is that of rollout i of group g; None: the rollout is not trained,
    because it is unscored, its group is too small, or its group's rewards are equal up to rounding
    (`offbook.base.rounding`).

    `by_call` is None unless advantages are per call. Then `by_call[g][i][k]` is the advantage of the calls of rollout i
    that follow its first k call rewards, and `values[g][i]` is `by_call[g][i][0]`."""

    values: tuple[tuple[float | None, ...], ...]
    too_few: int  # groups with fewer scored rollouts than min_group_size
    equal: tuple[int, ...]  # numbers of the groups whose scored rollouts all have the same reward, up to rounding
    by_call: tuple[tuple[tuple[float, ...] | None, ...], ...] | None = None

    @property
    def of_calls(self) -> tuple[tuple[tuple[float, ...] | None, ...], ...]:
        """`by_call`, or one advantage per rollout as a tuple of length 1."""
        if self.by_call is not None:
            return self.by_call
        return tuple(tuple(None if value is None else (value,) for value in group) for group in self.values)

    @property
    def no_spread(self) -> int:
        """Number of groups of equal rewards."""
        return len(self.equal)

    @property
    def trained_groups(self) -> int:
        """Number of groups in which a rollout has an advantage."""
        return sum(any(value is not None for value in group) for group in self.values)


def group_advantages(
    rewards: Sequence[Sequence[float | None]], *, min_group_size: int, divide_by_std: bool
) -> Advantages:
    """One advantage per rollout: its reward minus the mean reward of the group's scored rollouts.

    `divide_by_std` divides by their population standard deviation + 1e-6 (GRPO 2402.03300, section 4.1.2); Dr. GRPO
    2503.20783, section 3.2, does not. A reward of None (unscored) gets None and does not enter the mean. A reward that
    equals the mean up to rounding has the advantage 0. Raises ValueError for a reward that is not finite or beyond
    `LARGEST_REWARD`.

    The first group has an unscored rollout; the second has equal rewards, so it trains nothing:

    >>> advantages = group_advantages([[1.0, 3.0, None], [2.0, 2.0]], min_group_size=2, divide_by_std=False)
    >>> advantages.values
    ((-1.0, 1.0, None), (None, None))
    >>> advantages.no_spread, advantages.trained_groups
    (1, 1)
    """
    values: list[tuple[float | None, ...]] = []
    too_few, equal = 0, list[int]()
    for g, group in enumerate(rewards):
        scored = _scored(g, group)
        nothing: tuple[None, ...] = (None,) * len(group)
        if len(scored) < min_group_size:
            too_few += 1
            values.append(nothing)
        elif len(distinct(scored)) == 1:
            equal.append(g)
            values.append(nothing)
        else:
            values.append(_advantages(group, scored, divide_by_std))
    return Advantages(tuple(values), too_few, tuple(equal))


def call_advantages(
    rewards: Sequence[Sequence[float | None]],
    call_rewards: Sequence[Sequence[Sequence[float]]],
    *,
    min_group_size: int,
    divide_by_std: bool,
) -> Advantages:
    """Advantages per call, from the parts of the reward that were earned after the calls (`log_reward`).

    Process supervision of GRPO (2402.03300, section 4.1.3): all parts of a group are normalised together, and a call's
    advantage is the sum of the normalised parts that were earned after it. `call_rewards[g][i]`: the parts of rollout
    i, in order. The rest, reward minus the sum of the parts, is one more part at the end of every rollout, unless it
    is zero in the whole group and every rollout has parts. Raises ValueError as `group_advantages` does.

    Two rollouts have the rewards 1 and 3, with the parts (1) and (1, 2). The mean of all parts is 4/3, so the
    normalised parts are (-1/3) and (-1/3, 2/3). The first calls get -1/3 and 1/3, those after the first part 0 and
    2/3:

    >>> advantages = call_advantages([[1.0, 3.0]], [[[1.0], [1.0, 2.0]]], min_group_size=2, divide_by_std=False)
    >>> [[round(value, 3) for value in rollout] for rollout in advantages.by_call[0]]
    [[-0.333, 0.0], [0.333, 0.667, 0.0]]
    """
    values: list[tuple[float | None, ...]] = []
    by_call: list[tuple[tuple[float, ...] | None, ...]] = []
    too_few, equal = 0, list[int]()
    for g, (group, earned) in enumerate(zip(rewards, call_rewards, strict=True)):
        scored = _scored(g, group)
        for own in earned:
            _scored(g, own)  # the same limits
        parts = _parts(group, earned)
        all_parts = [part for rollout in parts if rollout is not None for part in rollout]
        to_go: tuple[tuple[float, ...] | None, ...] = (None,) * len(group)
        if len(scored) < min_group_size:
            too_few += 1
        elif len(distinct(all_parts)) <= 1:
            equal.append(g)
        else:
            mean, scale = _moments(all_parts, divide_by_std)
            smallest = rounding(all_parts) / 2
            to_go = tuple(
                None
                if rollout is None
                else tuple(_advantage(rest, smallest, scale) for rest in _sums_to_go(rollout, mean, len(own) + 1))
                for rollout, own in zip(parts, earned, strict=True)
            )
        by_call.append(to_go)
        values.append(tuple(None if sums is None else sums[0] for sums in to_go))
    return Advantages(tuple(values), too_few, tuple(equal), tuple(by_call))


def with_teacher(advantages: Advantages | None, failed: Sequence[Sequence[bool]]) -> Advantages:
    """The advantages of rewards, beside which a teacher adds its own: 0 for each rollout without one, so that it is trained
    all the same; None for those that failed. `advantages=None`: no rewards count.

    >>> rewards = group_advantages([[1.0, 3.0, None], [2.0, 2.0]], min_group_size=2, divide_by_std=False)
    >>> with_teacher(rewards, [[False, False, False], [False, True]]).values
    ((-1.0, 1.0, 0.0), (0.0, None))
    """
    of_calls = [[None] * len(group) for group in failed] if advantages is None else advantages.of_calls
    by_call = tuple(
        tuple(None if bad else values or (0.0,) for values, bad in zip(group, faults, strict=True))
        for group, faults in zip(of_calls, failed, strict=True)
    )
    values = tuple(tuple(None if rollout is None else rollout[0] for rollout in group) for group in by_call)
    return Advantages(values, too_few=0, equal=(), by_call=by_call)


def supervised_advantages(left_out: Sequence[Sequence[bool]]) -> Advantages:
    """The advantage 1 for every rollout that supervised training imitates, and none for those `left_out`.

    >>> supervised_advantages([[False, True], [False]]).values
    ((1.0, None), (1.0,))
    """
    return Advantages(tuple(tuple(None if out else 1.0 for out in group) for group in left_out), too_few=0, equal=())


def _parts(group: Sequence[float | None], earned: Sequence[Sequence[float]]) -> list[list[float] | None]:
    """Per rollout, the parts of its reward in the order in which they were earned, the rest last; None: unscored."""
    rests = [None if reward is None else reward - math.fsum(own) for reward, own in zip(group, earned, strict=True)]
    at_the_end = any(
        rest is not None and (not own or abs(rest) > RELATIVE * max(abs(reward or 0.0), *map(abs, own)))
        for reward, rest, own in zip(group, rests, earned, strict=True)
    )
    return [
        None if rest is None else [*own, *([rest] if at_the_end else [])]
        for rest, own in zip(rests, earned, strict=True)
    ]


def _sums_to_go(parts: Sequence[float], mean: float, count: int) -> tuple[float, ...]:
    """The sums of the parts minus `mean` after the first 0, 1, ..., count - 1 of them."""
    return tuple(math.fsum(part - mean for part in parts[k:]) for k in range(count))


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
    smallest = rounding(scored) / 2  # half of it, as some deviation is at least half of the spread
    return tuple(None if reward is None else _advantage(reward - mean, smallest, scale) for reward in group)


def _advantage(deviation: float, smallest: float, scale: float) -> float:
    """deviation / scale; 0 for a deviation of at most `smallest`, which is rounding. AdamW would make a whole update of
    it, since it divides by the gradient's size."""
    return 0.0 if abs(deviation) <= smallest else deviation / scale


def _moments(rewards: Sequence[float], divide_by_std: bool) -> tuple[float, float]:
    """The mean, and what the deviations from it are divided by."""
    mean = math.fsum(rewards) / len(rewards)
    if not divide_by_std:
        return mean, 1.0
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)) + STD_EPSILON
