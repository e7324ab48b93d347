"""Converts a train request and its recorded calls to the job that the learner reads, and keeps the folders of jobs."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from offbook.base.types import Call, CallOutput, CallTrace, RenderedHistory
from offbook.base.wire import TrainRequest, TrajectoryRecord

from ...engine.protocol import JobTrajectory, Sample, TrainJob, write_job
from ..errors import ApiError
from ..records.store import Store

KEPT_JOBS = 10
"""Job folders of failed requests that are kept, newest first."""


class JobFolders:
    """One folder per train request under `root`."""

    def __init__(self, root: Path, store: Store) -> None:
        self._root = root
        self._store = store

    def folder(self, request_id: str) -> Path:
        """The folder of a request, which may not exist."""
        return job_folder(self._root, request_id)

    async def prepare(self, request: TrainRequest) -> None:
        """Write the job of a request from its recorded calls.

        Raises what `build_job` raises, StoreError and OSError.
        """
        ids = check_ids(request)
        records, calls = await asyncio.gather(self._store.finished(ids), self._store.calls_of(ids))
        job = await asyncio.to_thread(build_job, request, records, calls)
        await asyncio.to_thread(_replace, self.folder(request.id), job)

    def remove(self, request_id: str) -> None:
        """Delete the folder of a request. Files that cannot be deleted stay. Blocks."""
        shutil.rmtree(self.folder(request_id), ignore_errors=True)

    def prune(self, waiting: Iterable[str] = ()) -> None:
        """Delete the oldest folders beyond KEPT_JOBS, except those of the requests `waiting` in the queue. Blocks."""
        if self._root.is_dir():
            needed = {self.folder(request_id) for request_id in waiting}
            unused = [folder for folder in self._root.iterdir() if folder not in needed]
            folders = sorted(unused, key=lambda folder: folder.stat().st_mtime, reverse=True)
            for folder in folders[KEPT_JOBS:]:
                shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, job: TrainJob) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    try:
        write_job(folder, job)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


_SHOWN = 5
"""Trajectory ids that a message names at most."""


def job_folder(jobs: Path, request_id: str) -> Path:
    """The job's folder, named by the request's id, or by its SHA-256 if the id is not a plain name.

    >>> str(job_folder(Path("jobs"), "train-1"))
    'jobs/train-1'
    >>> str(job_folder(Path("jobs"), "../train-1"))[:14]
    'jobs/id-1b78bd'
    """
    plain = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", request_id)
    return jobs / (request_id if plain else "id-" + hashlib.sha256(request_id.encode()).hexdigest())


def check_ids(request: TrainRequest) -> tuple[str, ...]:
    """All trajectory ids of a request, in order. Raises ApiError 400 for an empty group or a repeated id."""
    for index, group in enumerate(request.groups):
        if not group.trajectory_ids:
            raise ApiError(400, f"Group {index} has no trajectories", f"groups.{index}.trajectory_ids", "empty_group")
    ids = tuple(trajectory_id for group in request.groups for trajectory_id in group.trajectory_ids) + request.replayed
    repeated = [trajectory_id for trajectory_id, count in Counter(ids).items() if count > 1]
    if repeated:
        raise ApiError(400, f"Trajectories named more than once: {_some(repeated)}", "groups", "duplicate_trajectory")
    return ids


def build_job(
    request: TrainRequest,
    records: Mapping[str, TrajectoryRecord],
    calls: Mapping[str, Sequence[Call]],
) -> TrainJob:
    """Convert a train request to the learner's job.

    `records` and `calls` are the finished trajectories and their recorded calls, by trajectory id. A sample of the
    job is one completion of a usable call to the trained model; supervised training also takes those to other models, which have the
    same base, and the answers of other LLMs in a trajectory with nothing else. Raises ApiError 400 if a trajectory was not
    finished, or if no scored trajectory (in supervised training: none at all) has anything to train on.

    One rollout made one call, whose prompt has two tokens and whose answer has one:

    >>> from offbook.base.types import CallStatus, Sampling
    >>> output = CallOutput(index=0, token_ids=(7,), logprobs=(-0.5,), message={"content": "yes"}, finish_reason="stop")
    >>> call = Call(id="c1", trajectory_id="t1", model="agent", step=0, status=CallStatus.COMPLETE, sampling=Sampling(),
    ...     messages=(), tools=None, prompt_ids=(3, 4), outputs=(output,), started_at=1.0, ended_at=2.0)
    >>> record = TrajectoryRecord(id="t1", model="agent", reward=1.0, started_at=1.0, ended_at=2.0)
    >>> request = TrainRequest.model_validate({"id": "r1", "model": "agent", "groups": [{"trajectory_ids": ["t1"]}]})
    >>> trajectory = build_job(request, {"t1": record}, {"t1": [call]}).groups[0][0]
    >>> [(sample.prompt_ids.tolist(), sample.completion_ids.tolist()) for sample in trajectory.samples]
    [([3, 4], [7])]
    """
    ids = check_ids(request)
    removed = set(request.replayed).difference(records)  # since they were drawn
    ids = tuple(trajectory_id for trajectory_id in ids if trajectory_id not in removed)
    unknown = [trajectory_id for trajectory_id in ids if trajectory_id not in records]
    if unknown:
        raise ApiError(
            400,
            f"Trajectories that were never finished here: {_some(unknown)}. Finish them first (POST /api/trajectories)",
            "groups",
            "unknown_trajectory",
        )
    supervised, chosen = request.config.supervised, request.config.imitates_the_good
    to_model = None if supervised and not chosen else request.model
    built = {id: _trajectory(to_model, records[id], calls.get(id, ()), imitated=chosen) for id in ids}
    own = [built[id] for id in ids if id not in request.replayed]
    scored = [t for t in own if (t.reward is not None or supervised) and not t.failed]
    empty = [t for t in scored if not t.histories and not any(sample.weight for sample in t.samples)]
    if empty and len(empty) == len(scored):  # if only some are empty, the learner counts them and warns
        raise ApiError(400, _why_empty(empty, request, calls), "groups", "no_calls")
    groups = tuple(tuple(built[trajectory_id] for trajectory_id in group.trajectory_ids) for group in request.groups)
    earlier = (built[trajectory_id] for trajectory_id in request.replayed if trajectory_id not in removed)
    again = tuple((replace(rollout, replayed=True),) for rollout in earlier if rollout.samples or rollout.histories)
    return TrainJob(request.id, request.model, groups + again, request.config, request.evaluate)


def _why_empty(empty: Sequence[JobTrajectory], request: TrainRequest, calls: Mapping[str, Sequence[Call]]) -> str:
    model, supervised = request.model, request.config.supervised
    ids = [trajectory.id for trajectory in empty]
    excluded = len({sample.call_id for trajectory in empty for sample in trajectory.samples})
    others = sorted(
        {call.model for trajectory_id in ids for call in calls.get(trajectory_id, ()) if call.model != model}
    )
    if excluded:
        why = (
            f"train_on= excluded every call: all {excluded} calls that could be trained have weight 0; set a weight above 0 for "
            "those to train on"
        )
    elif others and (not supervised or request.config.imitates_the_good):
        why = f"their calls went to {', '.join(others)}, and only calls to {model!r} train it"
    elif any(call.beyond_text for trajectory_id in ids for call in calls.get(trajectory_id, ())):
        why = "their calls have images, sounds or files in their messages, and the learner computes text alone"
    elif any(calls.get(trajectory_id) for trajectory_id in ids):
        why = "their calls were cancelled, failed, or arrived after the end of the rollout"
    else:
        why = (
            "no call was recorded for them: use model.openai_client() and keep its choices, or name the trajectory in "
            "each call (header x-offbook-trajectory)"
        )
    reward = "" if supervised else "a reward but "
    return f"Trajectories with {reward}nothing to train on: {_some(ids)}: {why}"


def _trajectory(model: str | None, record: TrajectoryRecord, calls: Sequence[Call], *, imitated: bool) -> JobTrajectory:
    """A trajectory with a sample for each usable completion of `model`; None: of any model.

    `left_out` counts its other calls to `model`. `imitated`: what the app threw away has the weight 0.
    """
    to_model = [call for call in calls if model is None or call.model == model]
    unused = frozenset(record.unused)
    earned = _earned_before(record, calls)
    samples = [
        replace(
            _sample(call, output),
            weight=record.weights.get(call.id, 0.0 if imitated and call.id in unused else 1.0),
            unused=call.id in unused,
            earned_before=earned[call.id],
        )
        for call in to_model
        if call.status.usable and not call.late and not call.beyond_text
        for output in call.outputs
        if output.status.usable and output.token_ids
    ]
    sampled = {sample.call_id for sample in samples}
    histories = record.histories
    if model is None and not samples and not histories:
        histories = _answers_of_others(record.outside_calls)
    return JobTrajectory(
        record.id,
        record.reward,
        tuple(samples),
        histories,
        failed=record.exception is not None,
        left_out=sum(call.id not in sampled for call in to_model),
        call_rewards=tuple(record.call_rewards[call.id] for call in _in_order(calls) if call.id in record.call_rewards),
    )


def _answers_of_others(calls: Sequence[CallTrace]) -> tuple[RenderedHistory, ...]:
    """Each answer of other LLMs after its prompt, as in a recorded thread of an app on a paid model."""
    return tuple(
        RenderedHistory(messages=(*call.messages, output.message), tools=call.tools, targets=(len(call.messages),))
        for call in calls
        for output in call.outputs
        if output.status.usable and output.message.get("role") == "assistant"
    )


def _in_order(calls: Sequence[Call]) -> list[Call]:
    return sorted(calls, key=lambda call: (call.started_at, call.id))


def _earned_before(record: TrajectoryRecord, calls: Sequence[Call]) -> dict[str, int]:
    """For each call id, the number of call rewards of earlier calls, including those to other models."""
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
        allowed_texts=call.allowed_texts,
        tool_call=bool(output.message.get("tool_calls")),
        parse_failure=output.parse_failure,
        cut_off=output.finish_reason == "length",
    )


def _some(ids: Sequence[str]) -> str:
    rest = f" and {len(ids) - _SHOWN} more" if len(ids) > _SHOWN else ""
    return ", ".join(map(repr, ids[:_SHOWN])) + rest
