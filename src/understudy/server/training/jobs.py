"""From a train request and its records to the job that the learner reads. Pure, but for the folder at the end."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...engine.protocol import JobTrajectory, Sample, TrainJob
from ...types import Call, CallOutput
from ...wire import TrainRequest, TrajectoryRecord
from ..errors import ApiError

_SHOWN = 5


def job_folder(jobs: Path, request_id: str) -> Path:
    """The job's folder: named by the request's id where that is a plain name, else by its hash."""
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", request_id)
    return jobs / (request_id if plain else "id-" + hashlib.sha256(request_id.encode()).hexdigest())


def check_ids(request: TrainRequest) -> tuple[str, ...]:
    """The trajectory ids of a request in order. Raises ApiError 400 for an empty group or an id that comes twice."""
    for index, group in enumerate(request.groups):
        if not group.trajectory_ids:
            raise ApiError(400, f"Group {index} has no trajectories", f"groups.{index}.trajectory_ids", "empty_group")
    ids = tuple(trajectory_id for group in request.groups for trajectory_id in group.trajectory_ids)
    twice = [trajectory_id for trajectory_id, count in Counter(ids).items() if count > 1]
    if twice:
        raise ApiError(400, f"Trajectories named more than once: {_some(twice)}", "groups", "duplicate_trajectory")
    return ids


def build_job(
    request: TrainRequest,
    records: Mapping[str, TrajectoryRecord],
    calls: Mapping[str, Sequence[Call]],
) -> TrainJob:
    """The job of a request. Raises ApiError 400 for trajectories that are unknown, or when none has anything to train on."""
    ids = check_ids(request)
    unknown = [trajectory_id for trajectory_id in ids if trajectory_id not in records]
    if unknown:
        raise ApiError(
            400,
            f"Trajectories that were never finished here: {_some(unknown)}. Finish them first (POST /api/trajectories)",
            "groups",
            "unknown_trajectory",
        )
    built = {
        trajectory_id: _trajectory(request.model, records[trajectory_id], calls.get(trajectory_id, ()))
        for trajectory_id in ids
    }
    scored = [each for each in built.values() if each.reward is not None and not each.failed]
    empty = [each for each in scored if not each.histories and not any(sample.weight for sample in each.samples)]
    if empty and len(empty) == len(scored):  # else the learner counts them and warns
        raise ApiError(400, _why_empty(empty, request.model, calls), "groups", "no_calls")
    groups = tuple(tuple(built[trajectory_id] for trajectory_id in group.trajectory_ids) for group in request.groups)
    return TrainJob(request.id, request.model, groups, request.config)


def _why_empty(empty: Sequence[JobTrajectory], model: str, calls: Mapping[str, Sequence[Call]]) -> str:
    ids = [trajectory.id for trajectory in empty]
    excluded = len({sample.call_id for trajectory in empty for sample in trajectory.samples})
    others = sorted(
        {call.model for trajectory_id in ids for call in calls.get(trajectory_id, ()) if call.model != model}
    )
    if excluded:
        why = (
            f"train_on= left every call out: the weight of all {excluded} calls that could be trained is 0; give those "
            "that shall be trained a weight above 0"
        )
    elif others:
        why = f"their calls went to {', '.join(others)}, and only calls to {model!r} train it"
    elif any(calls.get(trajectory_id) for trajectory_id in ids):
        why = "their calls were cancelled, failed or came after the end of the rollout"
    else:
        why = (
            "no call was recorded for them: use model.openai_client() and keep its choices, or name the trajectory in "
            "each call (header x-understudy-trajectory)"
        )
    return f"Trajectories with a reward but nothing to train on: {_some(ids)}: {why}"


def _trajectory(model: str, record: TrajectoryRecord, calls: Sequence[Call]) -> JobTrajectory:
    ours = [call for call in calls if call.model == model]
    unused = frozenset(record.unused)
    earned = _earned_before(record, calls)
    samples = [
        replace(
            _sample(call, output),
            weight=record.weights.get(call.id, 1.0),
            unused=call.id in unused,
            earned_before=earned[call.id],
        )
        for call in ours
        if call.status.usable and not call.late
        for output in call.outputs
        if output.status.usable and output.token_ids
    ]
    sampled = {sample.call_id for sample in samples}
    return JobTrajectory(
        record.id,
        record.reward,
        tuple(samples),
        record.histories,
        failed=record.exception is not None,
        left_out=sum(call.id not in sampled for call in ours),
        call_rewards=tuple(record.call_rewards[call.id] for call in _in_order(calls) if call.id in record.call_rewards),
    )


def _in_order(calls: Sequence[Call]) -> list[Call]:
    return sorted(calls, key=lambda call: (call.started_at, call.id))


def _earned_before(record: TrajectoryRecord, calls: Sequence[Call]) -> dict[str, int]:
    """By call id: how many call rewards belong to calls that began earlier, also to those of other models."""
    earlier, count = dict[str, int](), 0
    for call in _in_order(calls):
        earlier[call.id] = count
        count += call.id in record.call_rewards
    return earlier


def _sample(call: Call, output: CallOutput) -> Sample:
    return Sample(
        call_id=call.id,
        index=output.index,
        prompt_ids=np.asarray(call.prompt_ids, np.int32),
        completion_ids=np.asarray(output.token_ids, np.int32),
        logprobs=np.asarray(output.logprobs, np.float32),
        sampling=call.sampling,
        step=call.step,
        constrained=call.constrained,
        tool_call=bool(output.message.get("tool_calls")),
        parse_failure=output.parse_failure,
    )


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(repr(each) for each in ids[:_SHOWN]) + more
