"""Group-relative advantages: a rollout's reward compared with the rewards of its group. Plain numbers, no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from offbook.base.numbers import RELATIVE, distinct, reaches, rounding

STD_EPSILON = 1e-6
MAX_REWARD = 1e100
"""Larger rewards are rejected: their sums of squares could overflow."""


class GroupClass(StrEnum):
    """What a step does with a group. Each group of a request is in exactly one class, whatever the loss is: the metric
    `groups/{class}` counts them, and the counts sum to `groups/total`."""

    TRAINED = "trained"  # a token of it is trained
    NO_SPREAD = "no_spread"  # all scored rollouts have the same reward, up to rounding
    ALL_GOOD = "all_good"  # of a step with min_reward: all rollouts have it
    NONE_GOOD = "none_good"  # of a step with min_reward: no rollout has it
    DROPPED_TOO_FEW = "dropped_too_few"  # fewer scored rollouts than min_group_size; none where rollouts are imitated
    TRUNCATED = "truncated"  # all rollouts with an advantage are left out by mask_truncated_completions
    WITHOUT_TARGETS = "without_targets"  # rollouts have an advantage, and none of them a token to train


@dataclass(frozen=True)
class Advantages:
    """The advantages of a step. `values[g][i]` is that of rollout i of group g; None: the rollout is not trained,
    because it is unscored, or for its group's class. `classes[g]`: that class, as far as rewards decide it.

    `by_call` is None unless advantages are per call. Then `by_call[g][i][k]` is the advantage of the calls of rollout i
    that follow its first k call rewards, and `values[g][i]` is `by_call[g][i][0]`."""

    values: tuple[tuple[float | None, ...], ...]
    classes: tuple[GroupClass, ...]
    by_call: tuple[tuple[tuple[float, ...] | None, ...], ...] | None = None

    @property
    def of_calls(self) -> tuple[tuple[tuple[float, ...] | None, ...], ...]:
        """`by_call`, or one advantage per rollout as a tuple of length 1."""
        if self.by_call is not None:
            return self.by_call
        return tuple(tuple(None if value is None else (value,) for value in group) for group in self.values)

    def count(self, group_class: GroupClass) -> int:
        """Number of groups of a class."""
        return self.classes.count(group_class)


def group_advantages(
    rewards: Sequence[Sequence[float | None]], *, min_group_size: int, divide_by_std: bool
) -> Advantages:
    """One advantage per rollout: its reward minus the mean reward of the group's scored rollouts.

    `divide_by_std` divides by their population standard deviation + 1e-6 (GRPO 2402.03300, section 4.1.2); Dr. GRPO
    2503.20783, section 3.2, does not. A reward of None (unscored) gets None and does not enter the mean. A reward that
    equals the mean up to rounding has the advantage 0. Raises ValueError for a reward that is not finite or beyond
    `MAX_REWARD`.

    The first group has an unscored rollout; the second has equal rewards, so it trains nothing:

    >>> advantages = group_advantages([[1.0, 3.0, None], [2.0, 2.0]], min_group_size=2, divide_by_std=False)
    >>> advantages.values
    ((-1.0, 1.0, None), (None, None))
    >>> [str(group_class) for group_class in advantages.classes]
    ['trained', 'no_spread']
    """
    values: list[tuple[float | None, ...]] = []
    classes: list[GroupClass] = []
    for g, group in enumerate(rewards):
        scored = _scored(g, group)
        classes.append(_by_spread(scored, len(distinct(scored)), min_group_size))
        trained = classes[-1] is GroupClass.TRAINED
        values.append(_advantages(group, scored, divide_by_std) if trained else (None,) * len(group))
    return Advantages(tuple(values), tuple(classes))


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
    classes: list[GroupClass] = []
    for g, (group, earned) in enumerate(zip(rewards, call_rewards, strict=True)):
        scored = _scored(g, group)
        for own in earned:
            _scored(g, own)  # the same limits
        parts = _parts(group, earned)
        all_parts = [part for rollout in parts if rollout is not None for part in rollout]
        to_go: tuple[tuple[float, ...] | None, ...] = (None,) * len(group)
        classes.append(_by_spread(scored, len(distinct(all_parts)), min_group_size))
        if classes[-1] is GroupClass.TRAINED:
            mean, scale = _moments(all_parts, divide_by_std)
            smallest = rounding(all_parts) / 2
            to_go = tuple(
                None
                if rollout is None
                else tuple(
                    _advantage(rest, smallest, scale)
                    for rest in [math.fsum(part - mean for part in rollout[k:]) for k in range(len(own) + 1)]
                )
                for rollout, own in zip(parts, earned, strict=True)
            )
        by_call.append(to_go)
        values.append(tuple(None if sums is None else sums[0] for sums in to_go))
    return Advantages(tuple(values), tuple(classes), tuple(by_call))


def _by_spread(scored: Sequence[float], different: int, min_group_size: int) -> GroupClass:
    """The class of a group that is compared. `different`: how many different rewards, or parts of them, it has."""
    if len(scored) < min_group_size:
        return GroupClass.DROPPED_TOO_FEW
    return GroupClass.TRAINED if different > 1 else GroupClass.NO_SPREAD


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
    return Advantages(values, _any_trained(values), by_call)


def supervised_advantages(failed: Sequence[Sequence[bool]]) -> Advantages:
    """The advantage 1 for every rollout that supervised training imitates, and none for those that `failed`.

    >>> supervised_advantages([[False, True], [False]]).values
    ((1.0, None), (1.0,))
    """
    values = tuple(tuple(None if bad else 1.0 for bad in group) for group in failed)
    return Advantages(values, _any_trained(values))


def good_advantages(rewards: Sequence[Sequence[float | None]], min_reward: float) -> Advantages:
    """The advantage 1 for every rollout with at least `min_reward`; none in a group of several that are all good, which
    has nothing to learn. A reward of None is a rollout that failed or was not scored, which is not good. Raises ValueError
    as `group_advantages` does.

    >>> advantages = good_advantages([[1.0, 0.0, None], [1.0, 1.0], [0.0, None], [None]], 1.0)
    >>> advantages.values
    ((1.0, None, None), (None, None), (None, None), (None,))
    >>> [str(group_class) for group_class in advantages.classes]
    ['trained', 'all_good', 'none_good', 'dropped_too_few']
    """
    values: list[tuple[float | None, ...]] = []
    classes: list[GroupClass] = []
    for g, group in enumerate(rewards):
        good = [reward is not None and reaches(reward, min_reward) for reward in group]
        if not _scored(g, group):
            classes.append(GroupClass.DROPPED_TOO_FEW)
        elif not any(good):
            classes.append(GroupClass.NONE_GOOD)
        else:
            classes.append(GroupClass.ALL_GOOD if len(group) > 1 and all(good) else GroupClass.TRAINED)
        trained = classes[-1] is GroupClass.TRAINED
        values.append(tuple(1.0 if trained and is_good else None for is_good in good))
    return Advantages(tuple(values), tuple(classes))


def without(advantages: Advantages, left_out: Sequence[Sequence[bool]]) -> Advantages:
    """The advantages without the rollouts `left_out`, whose rewards stay in the means of their groups.

    >>> compared = group_advantages([[1.0, 3.0], [1.0, 3.0]], min_group_size=2, divide_by_std=False)
    >>> rest = without(compared, [[True, False], [True, True]])
    >>> rest.values, [str(group_class) for group_class in rest.classes]
    (((None, 1.0), (None, None)), ['trained', 'truncated'])
    """
    of_calls = tuple(
        tuple(None if out else calls for calls, out in zip(group, outs, strict=True))
        for group, outs in zip(advantages.of_calls, left_out, strict=True)
    )
    values = tuple(tuple(None if calls is None else calls[0] for calls in group) for group in of_calls)
    classes = tuple(
        GroupClass.TRUNCATED if was is GroupClass.TRAINED and not any(left is not None for left in group) else was
        for was, group in zip(advantages.classes, values, strict=True)
    )
    return replace(advantages, values=values, classes=classes, by_call=advantages.by_call and of_calls)


def _any_trained(values: Sequence[Sequence[float | None]]) -> tuple[GroupClass, ...]:
    """The classes of groups that are trained if any of their rollouts has an advantage."""
    return tuple(
        GroupClass.TRAINED if any(value is not None for value in group) else GroupClass.DROPPED_TOO_FEW
        for group in values
    )


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


def _scored(g: int, group: Sequence[float | None]) -> list[float]:
    scored = [reward for reward in group if reward is not None]
    if not all(map(math.isfinite, scored)):
        raise ValueError(f"group {g}: rewards must be finite numbers or None (unscored), got {list(group)!r}")
    if max(map(abs, scored), default=0.0) > MAX_REWARD:
        raise ValueError(
            f"group {g}: rewards beyond +-{MAX_REWARD:g} overflow in the advantages, got {list(group)!r}: "
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
    mean = math.fsum(rewards) / len(rewards)
    if not divide_by_std:
        return mean, 1.0
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards)) + STD_EPSILON
