"""The HTTP API between client and server, besides OpenAI's own endpoints.

| call | request body -> response |
|---|---|
| GET    /health | -> Health |
| GET    /api/models | -> list[ModelState] |
| POST   /api/models | RegisterRequest -> ModelState |
| GET    /api/models/{name} | -> ModelState |
| POST   /api/models/{name}/fork | ForkRequest -> ModelState |
| POST   /api/models/{name}/log | LogRequest -> {} |
| GET    /api/models/{name}/log | -> list[LogRequest], oldest first |
| GET    /api/models/{name}/state | -> UserState (empty if never written) |
| PUT    /api/models/{name}/state | UserState -> UserState (replaces the old one) |
| GET    /api/models/{name}/checkpoints | -> list[CheckpointState] |
| DELETE /api/models/{name}/checkpoints/{step} | -> {} |
| POST   /api/models/{name}/checkpoints/{step}/export | ExportRequest -> ExportResult |
| POST   /api/models/{name}/checkpoints/{step}/archive | ArchiveRequest -> ArchiveState |
| GET    /api/exports/{archive id} | -> the archive, a tar. Supports `Range` and `If-Range`; `ETag` is its SHA-256 |
| DELETE /api/exports/{archive id} | -> {} |
| POST   /api/trajectories | FinishRequest -> FinishResult |
| GET    /api/trajectories?{TrajectoryQuery} | -> TrajectoryPage |
| GET    /api/trajectories/{id} | -> TrajectoryWithCalls |
| GET    /api/traces?{TrajectoryQuery} | -> TracePage: finished trajectories with their calls, without token arrays |
| POST   /api/train | TrainRequest -> server-sent events, each a TrainEvent; the last is `result` or `error` |
| GET    /api/train/{request id} | -> TrainStatus |

Errors have OpenAI's shape: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

from .config import GROUPS_AT_ONCE, LoraOptions, Name, TrainConfig
from .json_files import DEEPEST, too_deep
from .types import (
    Call,
    CallOrigin,
    CallRef,
    CallTrace,
    Json,
    PlaceName,
    RenderedHistory,
    RolloutException,
    RolloutPlace,
    ToolRun,
    TrainResult,
    UnixSeconds,
    new_id,
)

TRAJECTORY_HEADER = "x-offbook-trajectory"
CALL_HEADER = "x-offbook-call"
"""Response header: the id of the recorded call."""
THREAD_HEADER = "x-offbook-thread"
"""Request header below /r/ROUTE: the app's own name of the thread that a call belongs to."""
RECORD_HEADER = "x-offbook-record"
OPEN = "open"
"""Id prefix of calls recorded outside a capture. The trajectory that holds one of their choices claims them later."""
IDEMPOTENCY_HEADER = "idempotency-key"
ORIGIN_HEADER = "x-offbook-origin"
"""A CallOrigin as ASCII JSON."""
LENGTH_HEADER = "x-offbook-length"
"""Value `fit`: `max_tokens` was chosen for another model, so the server may lower it to fit the context."""


def call_headers(
    trajectory_id: str | None = None, origin: CallOrigin | None = None, *, fit: bool = False
) -> dict[str, str]:
    """Headers of a model call: its trajectory, its origin in the app, and whether the server may lower `max_tokens`."""
    headers: dict[str, str] = {}
    if trajectory_id is not None:
        headers[TRAJECTORY_HEADER] = trajectory_id
    if origin is not None:
        headers[ORIGIN_HEADER] = json.dumps(origin.model_dump(exclude_defaults=True))
    if fit:
        headers[LENGTH_HEADER] = "fit"
    return headers


def is_labelled(url: str, headers: Iterable[str]) -> bool:
    """Whether a request with these header names is a model call that an Offbook server records."""
    names = {name.lower() for name in headers}
    by_url = "/t/" in url and url.rstrip("/").endswith("/chat/completions")
    return TRAJECTORY_HEADER in names or RECORD_HEADER in names or by_url


FINISHED_AT_ONCE = 1_000
"""Limit of trajectories in one FinishRequest."""
CallWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def name_at(model: str, step: int) -> str:
    """`model@step`: names one fixed step in a call's `model` field, and its adapter in the sampler."""
    return f"{model}@{step}"


def _storable(value: Json) -> Json:
    """Reject NaN and infinity anywhere inside `value`, numbers too long to print, and a value that is nested too deeply."""
    fault, structures = None, DEEPEST + 1
    try:
        text = json.dumps(value, allow_nan=False)  # in C; the search below takes a hundred times as long
        structures = text.count("{") + text.count("[")
    except (ValueError, TypeError, RecursionError) as error:
        fault = error
    if too_deep(value, structures):
        raise ValueError(f"nested too deeply: {DEEPEST} levels are the limit")
    if fault is not None and (number := _not_finite(value)) is not None:
        raise ValueError(f"JSON has no NaN and no infinity, got {number}")
    if isinstance(fault, ValueError):
        raise fault
    return value


def _not_finite(value: Json, path: str = "") -> str | None:
    """The first number inside `value` that is not finite, and its path."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value!r}{path and f' at {path}'}"
    children: Iterable[tuple[Json, Json]] = ()
    if isinstance(value, dict):
        children = cast(dict[Json, Json], value).items()
    elif isinstance(value, list | tuple):
        children = enumerate(cast(Sequence[Json], value))
    faults = (_not_finite(child, f"{path}[{key!r}]") for key, child in children)
    return next((fault for fault in faults if fault is not None), None)


StoredJson = Annotated[Json, AfterValidator(_storable)]
"""A JSON value that is returned exactly as it was stored. Validation rejects NaN and infinity."""


class Wire(BaseModel):
    """Base of all request and response bodies: immutable, unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Health(Wire):
    """The state of the server and its engine processes."""

    status: Literal["ok", "starting", "failed"]
    version: str
    base_model: str
    engine: str
    pid: int
    detail: str | None = None
    in_flight: int = 0  # calls that the engine is sampling
    restarts: int = 0  # of the sampler process
    wrong_answers: int = 0  # sampler responses that did not fit their request; their calls failed
    learner: dict[str, str] = {}  # device, precision, loader, mask probe; empty until its process has loaded the base


class RegisterRequest(Wire):
    """Create a trainable model, or return the existing one. 409: the name has another base model or LoRA shape."""

    name: Name
    project: Name = "default"
    base_model: str = Field(min_length=1)
    lora: LoraOptions | None = None  # None: the existing model's options, or the defaults


class ModelState(Wire):
    """A trainable model and its newest step."""

    name: str
    project: str
    base_model: str
    step: int
    lora: LoraOptions
    checkpoint: str | None  # folder of the newest step; None at step 0
    training: bool = False  # a train request waits or is being applied; in answers to GET /api/models/{name}
    steps_held: int = 0  # the newest steps that a part of the server still reads, such as a copy that is under way
    damaged: tuple[str, ...] = ()  # checkpoints of later steps that were set aside when the server started


class ForkRequest(Wire):
    """Create model `name` from step `from_step` (default: the newest) of the model in the URL."""

    name: Name
    project: Name | None = None
    from_step: int | None = Field(default=None, ge=0, lt=2**31)


class AdoptRequest(Wire):
    """Make step `step` of `model` the next step of the model in the URL, which must be at step `after`."""

    model: Name
    step: int = Field(ge=1, lt=2**31)
    after: int = Field(ge=0, lt=2**31)


class LogRequest(Wire):
    """The user's own metrics, stored with the model. An `id` that the model's log has already changes nothing."""

    id: Name | None = None
    split: str = Field(default="val", min_length=1, max_length=64)
    step: int | None = Field(default=None, ge=0, lt=2**31)
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    trajectory_ids: tuple[str, ...] = ()


class RunEnd(Wire):
    """A run that is over, as its trainer says."""

    run: PlaceName


class UserState(Wire):
    """The user's own JSON object, stored with the model."""

    value: dict[str, StoredJson] = Field(default_factory=dict)


class CheckpointState(Wire):
    """One checkpoint of a model, and the train request that wrote it. `size`: of its files, in bytes; 0: unknown."""

    step: int
    path: str  # folder on the server's machine
    created_at: UnixSeconds
    request_id: str | None
    metrics: dict[str, FiniteFloat]
    size: int = 0


class ModelRecords(Wire):
    """A model's checkpoints by step, and its logged metrics, oldest first."""

    name: str
    checkpoints: tuple[CheckpointState, ...]
    logs: tuple[LogRequest, ...]


ExportFormat = Literal["peft", "merged", "gguf-ready"]
"""peft: the LoRA alone. merged: base and LoRA as one model. gguf-ready: merged, for llama.cpp's converter."""


class ExportRequest(Wire):
    """Write a checkpoint to a folder on the server's machine."""

    format: ExportFormat = "peft"
    output: str = Field(min_length=1)  # must not exist


KEPT_WELL = 0.95
"""`adapter_kept` below which a merged model is not the one that was trained."""


class ExportResult(Wire):
    """The folder that an export wrote. `note`: how it was checked and what rounding left of the adapter, for a merged
    model; `adapter_kept`: the second as a number, the correlation of the weights' change with the adapter."""

    path: str
    format: str
    step: int
    note: str = ""
    adapter_kept: float | None = None


class ArchiveRequest(Wire):
    """Pack a checkpoint into an archive for download."""

    format: ExportFormat = "peft"


class ArchiveState(Wire):
    """An export as one tar of regular files. `size` is in bytes; `sha256` is of the whole tar, in hex; `note` as in
    ExportResult."""

    id: str = Field(pattern="^[A-Za-z0-9][A-Za-z0-9._@-]{0,199}$")
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    note: str = ""


class TrajectoryRecord(Wire):
    """A finished rollout. `calls=None`: all calls recorded under `id` belong to it; else it claims exactly these."""

    id: str = Field(min_length=1, max_length=200)
    model: str
    calls: tuple[CallRef, ...] | None = None
    histories: tuple[RenderedHistory, ...] = ()
    reward: FiniteFloat | None = None
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    metadata: dict[str, StoredJson] = Field(default_factory=dict)
    logs: tuple[str, ...] = ()
    exception: RolloutException | None = None
    weights: dict[str, CallWeight] = Field(default_factory=dict)  # by call id; 0: not trained; missing: 1
    call_rewards: dict[str, FiniteFloat] = Field(default_factory=dict)  # by call id: reward earned after the call
    unused: tuple[str, ...] = ()  # ids of calls whose output the app discarded
    tool_runs: tuple[ToolRun, ...] = ()  # in order of start
    outside_calls: tuple[CallTrace, ...] = ()  # see Trajectory.outside_calls
    started_at: UnixSeconds
    ended_at: UnixSeconds
    place: RolloutPlace = RolloutPlace()

    @field_validator("histories")
    @classmethod
    def _targets_are_answers(cls, histories: tuple[RenderedHistory, ...]) -> tuple[RenderedHistory, ...]:
        for history in histories:
            if history.weights and len(history.weights) != len(history.targets):
                raise ValueError(f"weights holds {len(history.weights)} values for {len(history.targets)} targets")
            for target in history.targets:
                if not 0 <= target < len(history.messages):
                    raise ValueError(f"targets holds {target}, but there are {len(history.messages)} messages")
                if (role := history.messages[target].get("role")) != "assistant":
                    raise ValueError(
                        f"targets holds {target}, a message of role {role!r}: only an assistant's is trained"
                    )
            for index, message in enumerate(history.messages):
                if not (_is_content(message.get("content")) and _are_tool_calls(message.get("tool_calls"))):
                    raise ValueError(
                        f"messages[{index}] is no chat message: content is text or parts, tool_calls functions"
                    )
            _storable([*history.messages, *(history.tools or ())])
        return histories

    @field_validator("outside_calls")
    @classmethod
    def _are_json(cls, calls: tuple[CallTrace, ...]) -> tuple[CallTrace, ...]:
        for call in calls:
            _storable([*call.messages, *(call.tools or ()), *(output.message for output in call.outputs)])
        return calls


def _is_content(value: Json) -> bool:
    parts = cast(list[Json], value) if isinstance(value, list) else None
    return isinstance(value, str | None) or (parts is not None and all(isinstance(part, str | dict) for part in parts))


def _are_tool_calls(value: Json) -> bool:
    calls = cast(list[dict[str, Json]], value) if isinstance(value, list) else None
    shaped = calls is not None and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)  # pyright: ignore[reportUnnecessaryIsInstance]  # unvalidated JSON
    return value is None or shaped


class FinishRequest(Wire):
    """End rollouts. Later calls under a finished id are answered and recorded as late, but never trained.
    Finishing an id again replaces its reward, metrics, metadata and logs."""

    trajectories: tuple[TrajectoryRecord, ...] = Field(min_length=1, max_length=FINISHED_AT_ONCE)


class FinishResult(Wire):
    """Call counts by trajectory id."""

    calls: dict[str, int]  # recorded
    expired: dict[str, int] = {}  # deleted, because no trajectory claimed them in time


class TrajectoryQuery(Wire):
    """Filters of a list of finished trajectories; all must match. `after`: the `next` of the previous page."""

    model: str | None = Field(default=None, min_length=1)  # a model that it called, or was finished for
    run: str | None = Field(default=None, min_length=1)
    split: str | None = Field(default=None, min_length=1)
    step: int | None = Field(default=None, ge=0, lt=2**31)
    scenario: str | None = Field(default=None, min_length=1)
    group: str | None = Field(default=None, min_length=1)
    groups: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), max_length=100)  # any of these
    scored: bool | None = None  # whether it has a reward
    failed: bool | None = None  # whether an exception ended it
    limit: int = Field(default=100, ge=1, le=10_000)
    after: str | None = Field(default=None, pattern=r"^[0-9]{1,18}$")


class TrajectoryPage(Wire):
    """Trajectories, newest finish first. Finishing one again does not move it. What finishes while a client reads pages
    sorts before the first page. `next`: an opaque cursor; None on the last page."""

    trajectories: tuple[TrajectoryRecord, ...]
    next: str | None = None


class TrajectoryWithCalls(Wire):
    """A trajectory and its recorded calls, with their token arrays."""

    trajectory: TrajectoryRecord | None  # None: not finished yet
    calls: tuple[Call, ...]

    def all_calls(self) -> tuple[Call, ...]:
        """The recorded calls and those that other LLMs answered, which have no tokens, in order of start."""
        outside = () if self.trajectory is None else self.trajectory.outside_calls
        calls = (*self.calls, *(call.without_tokens() for call in outside))
        return tuple(sorted(calls, key=lambda call: call.started_at)) if outside else self.calls


class RolloutTrace(Wire):
    """A finished trajectory and its calls in order of start."""

    record: TrajectoryRecord
    calls: tuple[CallTrace, ...]


class TracePage(Wire):
    """Rollouts in the order of a TrajectoryPage. `next`: an opaque cursor; None on the last page."""

    rollouts: tuple[RolloutTrace, ...]
    next: str | None = None


class GroupRecord(Wire):
    """The group of a train request: the ids of finished trajectories of one scenario."""

    trajectory_ids: tuple[str, ...]
    metadata: dict[str, StoredJson] = Field(default_factory=dict)
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)


class TrainRequest(Wire):
    """One step, applied at most once per `id`: a repeated request joins the running step or gets the stored result.
    `evaluate`: compute the cross-entropy of the groups and change nothing.
    `replayed`: finished trajectories of earlier requests that are imitated again, in none of the metrics of rewards."""

    id: str = Field(default_factory=lambda: new_id("train"), min_length=1, max_length=200)
    model: str
    groups: tuple[GroupRecord, ...] = Field(min_length=1, max_length=GROUPS_AT_ONCE)
    config: TrainConfig = Field(default_factory=TrainConfig)
    evaluate: bool = False
    replayed: tuple[str, ...] = Field(default=(), max_length=GROUPS_AT_ONCE)

    @model_validator(mode="after")
    def _replayed_by_its_loss(self) -> Self:
        if self.replayed and not self.config.imitates_the_good:
            raise ValueError("replayed= needs loss='cross_entropy' with min_reward=, which imitates good rollouts")
        return self

    @model_validator(mode="after")
    def _evaluated_by_its_loss(self) -> Self:
        if self.evaluate and not self.config.supervised:
            raise ValueError("evaluate=true needs loss='cross_entropy': a policy-gradient loss measures no policy")
        return self


class TrainEvent(Wire):
    """One event of a train request's stream. Progress is `done` of `total` in `phase`; the last event has `result` or
    `error`."""

    kind: Literal["progress", "warning", "result", "error"]
    phase: str = ""
    done: int = 0
    total: int = 0
    message: str = ""
    result: TrainResult | None = None
    error: dict[str, Json] | None = None  # {"message", "code", "param"}: code is TrainError.reason


class TrainStatus(Wire):
    """The state of a train request; `interrupted`: the server ended before the step was applied."""

    id: str
    model: str
    state: Literal["queued", "running", "done", "failed", "interrupted"]
    result: TrainResult | None = None
    error: str | None = None
