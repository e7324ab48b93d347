"""Rollouts as the server takes them: pure, and the place where bad ones are refused by name."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping
from itertools import count
from typing import cast

from openai.types.chat.chat_completion import Choice

from ..errors import ConfigError
from ..types import (
    History,
    Json,
    Message,
    Metric,
    RenderedHistory,
    RolloutException,
    RolloutPlace,
    Trajectory,
    TrajectoryGroup,
    call_ref,
    new_id,
)
from ..wire import GroupRecord, TrajectoryRecord

LARGEST_NUMBER = 1e100
"""Of rewards and metrics: sums of the squares of larger ones overflow."""

GroupWire = tuple[tuple[TrajectoryRecord, ...], GroupRecord]


def group_wires(groups: Iterable[TrajectoryGroup], model: str, request_id: str) -> list[GroupWire]:
    """Every group as its finished trajectories and its record; the same each time for the same request.

    Raises ConfigError naming group and trajectory for a rollout that cannot be trained: a reward that is no finite number,
    the same rollout twice, a group that has not been gathered; or where no rollout has a call. Single ones may have none,
    an opponent that never moved say: their rewards count in the group's mean, and the learner warns.
    """
    wires: list[GroupWire] = []
    seen: dict[str, str] = {}
    silent: list[str] = []
    for at, group in enumerate(checked_groups(groups)):
        if group.pending:
            raise ConfigError(f"group {at} has rollouts that have not run: pass it to gather_trajectory_groups first")
        known = RolloutPlace(split="train", group=f"{request_id}/{at}")
        records = group_records(group, model, known, at)
        for number, trajectory in enumerate(group.trajectories):
            where = _where(trajectory, at, number)
            if trajectory.id in seen:
                raise ConfigError(f"{where} is the same rollout as {seen[trajectory.id]}: each may be trained once")
            seen[trajectory.id] = f"group {at}, rollout {number}"
            if not _can_be_trained(records[number]):
                silent.append(where)
        ids = tuple(record.id for record in records)
        metrics = _finite(group.metrics, f"group {at}: metrics")
        metadata = as_json(group.metadata, f"group {at}: metadata")
        wires.append((tuple(records), GroupRecord(trajectory_ids=ids, metadata=metadata, metrics=metrics)))
    if silent and len(silent) == len(seen):
        raise ConfigError(
            f"{silent[0]} has no model call, and neither has any other: append `completion.choices[0]` to "
            "messages_and_choices (plain assistant messages are context, not targets), or make the calls inside a capture"
        )
    return wires


def group_records(
    group: TrajectoryGroup, model: str, known: RolloutPlace, at: int | None = None
) -> list[TrajectoryRecord]:
    """Every rollout of a group, those that left nothing but an exception last: these have the indexes that the others leave
    free. What neither rollout nor group knows of its place is taken from `known`. `at`: the group's number, for errors."""
    common = group.place.filled(known)
    records = [
        trajectory_record(trajectory, model, _where(trajectory, at, number), common, number)
        for number, trajectory in enumerate(group.trajectories)
    ]
    taken = {record.place.index for record in records}
    free = (index for index in count() if index not in taken)
    places = [RolloutPlace(index=next(free)).filled(common) for _ in group.exceptions]
    return records + [
        _failed_record(error, model, place) for error, place in zip(group.exceptions, places, strict=True)
    ]


def rollout_records(
    items: Iterable[Trajectory | TrajectoryGroup], model: str, known: RolloutPlace
) -> list[TrajectoryRecord]:
    """Every rollout of trajectories and groups, to be finished outside of a train request. A group without an id gets one."""
    records: list[TrajectoryRecord] = []
    for item in items:
        if isinstance(item, TrajectoryGroup):
            records += group_records(item, model, known.filled(RolloutPlace(group=new_id("group"))))
        else:
            records.append(trajectory_record(item, model, _where(item), known))
    return records


def checked_groups(groups: Iterable[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The groups as a list; raises ConfigError for anything else, or for none."""
    if isinstance(groups, TrajectoryGroup):
        raise ConfigError("groups: got one TrajectoryGroup; pass a list of groups, `[group]`")
    found = list(groups)
    for at, group in enumerate(found):
        if not isinstance(group, TrajectoryGroup):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            raise ConfigError(f"groups[{at}] is a {type(group).__name__}; expected a TrajectoryGroup of rollouts")
    if not found:
        raise ConfigError("groups: the list is empty; a step needs at least one group")
    return found


def trajectory_record(
    trajectory: Trajectory, model: str, where: str, known: RolloutPlace, index: int | None = None
) -> TrajectoryRecord:
    """One rollout: the calls that its choices remember, or every call under its id when it was captured. Its place is
    completed by `known` and `index`.

    A choice of another endpoint has no recorded tokens: its history is rendered with the chat template.
    """
    histories = [trajectory, *trajectory.additional_histories]
    refs = dict.fromkeys(ref for history in histories for ref in history.call_refs())
    rendered = [found for history in histories if (found := _rendered(history)) is not None]
    return TrajectoryRecord(
        id=trajectory.id,
        model=model,
        calls=None if trajectory.captured else tuple(refs),
        histories=() if trajectory.captured else tuple(rendered),
        reward=_reward(trajectory.reward, where),
        metrics=_finite(trajectory.metrics, f"{where}: metrics"),
        metadata=as_json(trajectory.metadata, f"{where}: metadata"),
        logs=tuple(trajectory.logs),
        exception=trajectory.exception,
        weights=_weights(trajectory.weights, where),
        call_rewards=_finite(trajectory.call_rewards, f"{where}: call_rewards"),
        unused=tuple(trajectory.unused),
        tool_runs=tuple(trajectory.tool_runs),
        started_at=trajectory.started_at,
        ended_at=time.time() if trajectory.ended_at is None else trajectory.ended_at,
        place=trajectory.place.filled(known, index),
    )


def require_calls(groups: Iterable[GroupWire], recorded: Mapping[str, int]) -> None:
    """Raise ConfigError for captured rollouts where the server recorded no call at all. A single one without a call is
    counted by the learner: an agent may answer without its model."""
    every = [record for records, _ in groups for record in records]
    captured = [record for record in every if record.calls is None and record.exception is None]
    if captured and not any(recorded.get(record.id, 0) for record in every):
        raise ConfigError(
            f"{len(captured)} rollouts were captured, but the server recorded no call under any of them, such as "
            f"trajectory {captured[0].id}: does select= leave every call out, or does the agent call a model that is "
            "not captured? By hand: make the calls with model.openai_client() inside the capture"
        )


def _where(trajectory: Trajectory, group: int | None = None, number: int = 0) -> str:
    return f"trajectory {trajectory.id}" + ("" if group is None else f" (group {group}, rollout {number})")


def _can_be_trained(record: TrajectoryRecord) -> bool:
    return record.calls is None or bool(record.calls or record.histories) or record.exception is not None


def _failed_record(error: RolloutException, model: str, place: RolloutPlace) -> TrajectoryRecord:
    """A rollout that left nothing but its exception, under an id of its place: the same each time it is finished."""
    name = f"traj-failed-{hashlib.sha256(f'{place.run} {place.group} {place.index}'.encode()).hexdigest()[:24]}"
    at = time.time() if error.at is None else error.at
    return TrajectoryRecord(id=name, model=model, calls=(), exception=error, started_at=at, ended_at=at, place=place)


def _rendered(history: History) -> RenderedHistory | None:
    targets = tuple(
        at for at, item in enumerate(history.entries()) if isinstance(item, Choice) and call_ref(item) is None
    )
    if not targets:
        return None
    messages = tuple(cast(Message, message) for message in history.messages())
    tools = tuple(history.tools) if history.tools else None
    return RenderedHistory(messages=messages, tools=tools, targets=targets)


def _reward(reward: float | None, where: str) -> float | None:
    if reward is None:
        return None
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: reward must be a number or None (unscored), got {reward!r:.200}") from error
    if not math.isfinite(value):
        raise ConfigError(f"{where}: reward must be finite or None (unscored), got {value!r}")
    if abs(value) > LARGEST_NUMBER:
        raise ConfigError(f"{where}: reward must be within +-{LARGEST_NUMBER:g}, got {value!r}: scale it")
    return value


def as_numbers(values: Mapping[str, float], where: str) -> dict[str, float]:
    """Raises ConfigError naming the first that is no number, or too large a one."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{where}[{name!r}] must be a number, got {value!r:.200}") from error
        if LARGEST_NUMBER < abs(numbers[name]) < math.inf:
            raise ConfigError(f"{where}[{name!r}] must be within +-{LARGEST_NUMBER:g}, got {numbers[name]!r}: scale it")
    return numbers


def _finite(numbers: Mapping[str, Metric], where: str) -> dict[str, float]:
    values = as_numbers(numbers, where)
    for name, value in values.items():
        if not math.isfinite(value):
            raise ConfigError(f"{where}[{name!r}] must be finite, got {value!r}")
    return values


def _weights(weights: Mapping[str, float], where: str) -> dict[str, float]:
    values = as_numbers(weights, f"{where}: weights")
    for call_id, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigError(
                f"{where}: weights[{call_id!r}] must be a finite number of at least 0 (0 leaves the call out), got {value!r}"
            )
    return values


def as_json(values: Mapping[str, object], where: str) -> dict[str, Json]:
    """Raises ConfigError naming the first that is no JSON, also for a NaN deep inside: it would come back as null."""
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}[{name!r}] is no JSON ({error}), got {value!r}") from error
    return dict(values)
