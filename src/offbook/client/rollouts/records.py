"""Converts rollouts to the records that the server accepts, and rejects invalid ones with an error that names them.

The functions send nothing and change none of their arguments.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from itertools import count
from typing import cast

from offbook.base import clock
from offbook.base.choices import is_choice
from offbook.base.errors import ConfigError
from offbook.base.redaction import protect_environment, redacted_record
from offbook.base.text import counted
from offbook.base.types import (
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
from offbook.base.user_values import as_list, json_value, plain_text
from offbook.base.wire import GroupRecord, TrajectoryRecord

LARGEST_NUMBER = 1e100
"""Largest magnitude of a reward or metric. The sum of squares of larger numbers can overflow."""

GroupWire = tuple[tuple[TrajectoryRecord, ...], GroupRecord]
"""A group's finished trajectories, and the group's entry in the train request."""


def group_wires(groups: Iterable[TrajectoryGroup], model: str, request_id: str) -> list[GroupWire]:
    """Convert the groups of one train request. The result depends on the arguments only, so a request can be repeated.

    Raises ConfigError, naming the group and the trajectory, for a reward that is not a finite number, a rollout that occurs
    twice, and a group whose rollouts have not run. Also raises it when no rollout at all has a model call. A single rollout
    may have none (an opponent that never moved): its reward counts in the group's mean, and the learner warns.
    """
    wires: list[GroupWire] = []
    seen: dict[str, str] = {}
    without_calls: list[str] = []
    for group_number, group in enumerate(checked_groups(groups)):
        if group.pending:
            raise ConfigError(
                f"group {group_number} has rollouts that have not run: pass it to gather_trajectory_groups first"
            )
        known = RolloutPlace(split="train", group=f"{request_id}/{group_number}")
        records = group_records(group, model, known, group_number)
        for number, trajectory in enumerate(group.trajectories):
            where = _where(trajectory, group_number, number)
            if trajectory.id in seen:
                raise ConfigError(f"{where} is the same rollout as {seen[trajectory.id]}: each may be trained once")
            seen[trajectory.id] = f"group {group_number}, rollout {number}"
            if not _can_be_trained(records[number]):
                without_calls.append(where)
        ids = tuple(record.id for record in records)
        metrics = _finite(group.metrics, f"group {group_number}: metrics")
        metadata = as_json(group.metadata, f"group {group_number}: metadata")
        entry = redacted_record(GroupRecord(trajectory_ids=ids, metadata=metadata, metrics=metrics))
        wires.append((tuple(records), entry))
    if without_calls and len(without_calls) == len(seen):
        raise ConfigError(
            f"{without_calls[0]} has no model call, and neither has any other: append `completion.choices[0]` to "
            "messages_and_choices (plain assistant messages are context, not targets), or make the calls inside a capture"
        )
    return wires


def group_records(
    group: TrajectoryGroup, model: str, known: RolloutPlace, group_number: int | None = None
) -> list[TrajectoryRecord]:
    """Convert every rollout of a group.

    Rollouts of which only an exception is left come last, and take the indexes that the others leave free. `known` fills the
    fields of a rollout's place that neither the rollout nor the group has. `group_number` is used in error messages only.
    """
    common = group.place.filled(known)
    records = [
        trajectory_record(trajectory, model, _where(trajectory, group_number, number), common, number)
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
    """Convert trajectories and groups that are finished outside a train request. A group without an id gets one."""
    records: list[TrajectoryRecord] = []
    for item in items:
        if isinstance(item, TrajectoryGroup):
            records += group_records(item, model, known.filled(RolloutPlace(group=new_id("group"))))
        else:
            records.append(trajectory_record(item, model, _where(item), known))
    return records


def checked_groups(groups: Iterable[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Return the groups as a list. Raises ConfigError when it is empty or an item is not a TrajectoryGroup."""
    if isinstance(groups, TrajectoryGroup):
        raise ConfigError("groups: got one TrajectoryGroup; pass a list of groups, `[group]`")
    group_list = as_list(groups, "groups", "group")
    for index, group in enumerate(group_list):
        if not isinstance(group, TrajectoryGroup):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
            hint = "; leave out groups that a judge could not score" if group is None else ""
            raise ConfigError(
                f"groups[{index}] is a {type(group).__name__}; expected a TrajectoryGroup of rollouts{hint}"
            )
    if not group_list:
        raise ConfigError("groups: the list is empty; a step needs at least one group")
    return group_list


def trajectory_record(
    trajectory: Trajectory, model: str, where: str, known: RolloutPlace, index: int | None = None
) -> TrajectoryRecord:
    """Convert one rollout.

    Its calls are those that its choices name; a captured rollout has every call recorded under its id. A choice of another
    endpoint has no recorded tokens, so the server renders that history with the chat template. `known` and `index` fill what
    is missing of its place; `where` begins the error messages. Keys in texts that are not trained are redacted.
    """
    protect_environment()
    return redacted_record(_plain_record(trajectory, model, where, known, index))


def _plain_record(
    trajectory: Trajectory, model: str, where: str, known: RolloutPlace, index: int | None = None
) -> TrajectoryRecord:
    histories = [trajectory, *trajectory.additional_histories]
    refs = dict.fromkeys(ref for history in histories for ref in history.call_refs())
    rendered = [history_record for history in histories if (history_record := _rendered(history)) is not None]
    return TrajectoryRecord(
        id=trajectory.id,
        model=model,
        calls=None if trajectory.captured else tuple(refs),
        histories=() if trajectory.captured else tuple(rendered),
        reward=_reward(trajectory.reward, where),
        metrics=_finite(trajectory.metrics, f"{where}: metrics"),
        metadata=as_json(trajectory.metadata, f"{where}: metadata"),
        logs=tuple(map(plain_text, trajectory.logs)),
        exception=trajectory.exception,
        weights=_weights(trajectory.weights, where),
        call_rewards=_finite(trajectory.call_rewards, f"{where}: call_rewards"),
        unused=tuple(trajectory.unused),
        tool_runs=tuple(trajectory.tool_runs),
        outside_calls=tuple(trajectory.outside_calls),
        started_at=trajectory.started_at,
        ended_at=clock.end_of(trajectory.started_at) if trajectory.ended_at is None else trajectory.ended_at,
        place=trajectory.place.filled(known, index),
    )


def make_recordable(trajectory: Trajectory) -> None:
    """Make plain what user code wrote into a rollout: numbers of numpy or torch, dates, text that UTF-8 cannot encode.

    Raises ConfigError for what cannot be recorded, so that it fails this rollout and not the request with all others.
    """
    try:
        plain = _plain_record(trajectory, "", "the trajectory", RolloutPlace())
        plain.model_dump_json()
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:  # pydantic's errors are ValueErrors
        raise ConfigError(f"the trajectory: {plain_text(error)}") from error
    trajectory.reward = plain.reward
    foreign = [name for name, value in trajectory.metrics.items() if not isinstance(value, int | float)]  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
    trajectory.metrics |= {name: plain.metrics[name] for name in foreign}
    trajectory.logs, trajectory.metadata = list(plain.logs), plain.metadata


def require_calls(groups: Iterable[GroupWire], recorded: Mapping[str, int]) -> None:
    """Raise ConfigError when rollouts were captured and the server recorded no call under any of them.

    A single rollout without a call is no error, since an agent may answer without its model; the learner counts it.
    `recorded` has the number of recorded calls by trajectory id.
    """
    all_records = [record for records, _ in groups for record in records]
    captured = [record for record in all_records if record.calls is None and record.exception is None]
    if captured and not any(recorded.get(record.id, 0) for record in all_records):
        raise ConfigError(
            f"the server recorded no call under {counted(len(captured), 'captured rollout')}, such as "
            f"trajectory {captured[0].id}: does select= leave every call out, or does the agent call a model that is "
            "not captured? By hand: make the calls with model.openai_client() inside the capture"
        )


def _where(trajectory: Trajectory, group: int | None = None, number: int = 0) -> str:
    return f"trajectory {trajectory.id}" + ("" if group is None else f" (group {group}, rollout {number})")


def _can_be_trained(record: TrajectoryRecord) -> bool:
    return record.calls is None or bool(record.calls or record.histories) or record.exception is not None


def _failed_record(error: RolloutException, model: str, place: RolloutPlace) -> TrajectoryRecord:
    """A rollout of which only the exception is left. Its id is derived from its place, so finishing it twice is safe."""
    name = f"traj-failed-{hashlib.sha256(f'{place.run} {place.group} {place.index}'.encode()).hexdigest()[:24]}"
    failed_at = clock.now() if error.at is None else error.at
    record = TrajectoryRecord(
        id=name, model=model, calls=(), exception=error, started_at=failed_at, ended_at=failed_at, place=place
    )
    return redacted_record(record)


def _rendered(history: History) -> RenderedHistory | None:
    targets = tuple(index for index, item in enumerate(history.entries()) if is_choice(item) and call_ref(item) is None)
    if not targets:
        return None
    messages = tuple(cast(Message, message) for message in history.messages())
    tools = tuple(history.tools) if history.tools else None
    return RenderedHistory(messages=messages, tools=tools, targets=targets)


def _reward(reward: float | None, where: str) -> float | None:
    return None if reward is None else _number(reward, f"{where}: reward", " or None (unscored)")


def _finite(numbers: Mapping[str, Metric], where: str) -> dict[str, float]:
    return {name: _number(value, f"{where}[{name!r}]") for name, value in numbers.items()}


def _number(value: object, where: str, otherwise: str = "") -> float:
    """A finite number of numpy, torch or Python as a float. Raises ConfigError, also for a magnitude above LARGEST_NUMBER."""
    try:
        number = float(value)  # type: ignore[arg-type]  # user input, checked here
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{where} must be a number{otherwise}, got {value!r:.200}") from error
    if not math.isfinite(number):
        raise ConfigError(f"{where} must be finite{otherwise}, got {number!r}")
    if abs(number) > LARGEST_NUMBER:
        raise ConfigError(f"{where} must be within +-{LARGEST_NUMBER:g}, got {number!r}: scale it")
    return number


def _weights(weights: Mapping[str, float], where: str) -> dict[str, float]:
    values = _finite(weights, f"{where}: weights")
    for call_id, value in values.items():
        if value < 0:
            raise ConfigError(
                f"{where}: weights[{call_id!r}] must be a finite number of at least 0 (0 leaves the call out), got {value!r}"
            )
    return values


def as_json(values: Mapping[str, object], where: str) -> dict[str, Json]:
    """Return the values as JSON: dates as text, for instance. Raises ConfigError naming the first that has no JSON.

    A nested NaN is rejected too: the server would return it as null.
    """
    plain: dict[str, Json] = {}
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()  # in C, and the usual case
            plain[plain_text(name)] = value
        except (TypeError, ValueError, RecursionError) as error:
            try:
                plain[plain_text(name)] = json_value(value, f"{where}[{name!r}]")
            except (ConfigError, RecursionError):
                raise ConfigError(
                    f"{where}[{name!r}] is not JSON ({error}), got {value!r:.500}: use JSON types only"
                ) from error
    return plain
