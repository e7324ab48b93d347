"""What client and server say to each other over HTTP (besides OpenAI's own shapes).

| call | body -> answer |
|---|---|
| GET    /health | -> Health |
| GET    /api/models | -> list[ModelState] |
| POST   /api/models | RegisterRequest -> ModelState |
| GET    /api/models/{name} | -> ModelState |
| POST   /api/models/{name}/fork | ForkRequest -> ModelState |
| POST   /api/models/{name}/log | LogRequest -> {} |
| GET    /api/models/{name}/log | -> list[LogRequest], oldest first |
| GET    /api/models/{name}/state | -> UserState (empty when never written) |
| PUT    /api/models/{name}/state | UserState -> UserState (replaces it) |
| GET    /api/models/{name}/checkpoints | -> list[CheckpointState] |
| DELETE /api/models/{name}/checkpoints/{step} | -> {} |
| POST   /api/models/{name}/checkpoints/{step}/export | ExportRequest -> ExportResult |
| POST   /api/models/{name}/checkpoints/{step}/archive | ArchiveRequest -> ArchiveState |
| GET    /api/exports/{archive id} | -> the archive, a tar; `Range` and `If-Range` are honoured, `ETag` is its SHA-256 |
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
from typing import Annotated, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat, field_validator

from .config import LoraOptions, Name, TrainConfig
from .tool_runs import ToolRun, UnixSeconds
from .types import (
    Call,
    CallOrigin,
    CallRef,
    CallStatus,
    Json,
    Message,
    RenderedHistory,
    RolloutException,
    RolloutPlace,
    Sampling,
    Tool,
    TrainResult,
    new_id,
)

TRAJECTORY_HEADER = "x-understudy-trajectory"
CALL_HEADER = "x-understudy-call"
"""In an answer: the id of the recorded call."""
RECORD_HEADER = "x-understudy-record"
OPEN = "open"
"""Prefix of the ids under which calls are recorded that no capture owns: the trajectory that keeps a choice claims it."""
IDEMPOTENCY_HEADER = "idempotency-key"
ORIGIN_HEADER = "x-understudy-origin"
"""JSON of a CallOrigin, ASCII."""
LENGTH_HEADER = "x-understudy-length"
"""`fit`: max_tokens was set for another model; where the context has less room, the room is the limit."""


def call_headers(
    trajectory_id: str | None = None, origin: CallOrigin | None = None, *, fit: bool = False
) -> dict[str, str]:
    """Headers of a model call: its trajectory, where in the app it is made, and whether `max_tokens` may be cut to `fit`."""
    headers: dict[str, str] = {}
    if trajectory_id is not None:
        headers[TRAJECTORY_HEADER] = trajectory_id
    if origin is not None:
        headers[ORIGIN_HEADER] = json.dumps(origin.model_dump(exclude_defaults=True))
    if fit:
        headers[LENGTH_HEADER] = "fit"
    return headers


def is_labelled(url: str, headers: Iterable[str]) -> bool:
    """Whether a request with headers of these names is a call to an Understudy server that will be recorded."""
    names = {name.lower() for name in headers}
    by_url = "/t/" in url and url.rstrip("/").endswith("/chat/completions")
    return TRAJECTORY_HEADER in names or RECORD_HEADER in names or by_url


def _storable(value: Json) -> Json:
    """Refuses NaN and infinity anywhere inside: JSON has no word for them, so they would come back as null."""
    try:
        json.dumps(value, allow_nan=False)  # in C: the search below takes a hundred times longer
    except (ValueError, TypeError, RecursionError):
        return _searched(value)
    return value


def _searched(value: Json) -> Json:
    if (found := _not_finite(value)) is not None:
        raise ValueError(f"JSON has no NaN and no infinity, got {found}")
    return value


def _not_finite(value: Json, place: str = "") -> str | None:
    """The first number inside that is not finite, and where it is."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{value!r}{place and f' at {place}'}"
    inside: Iterable[tuple[Json, Json]] = ()
    if isinstance(value, dict):
        inside = cast(dict[Json, Json], value).items()
    elif isinstance(value, list | tuple):
        inside = enumerate(cast(Sequence[Json], value))
    found = (_not_finite(item, f"{place}[{key!r}]") for key, item in inside)
    return next((each for each in found if each is not None), None)


FINISHED_AT_ONCE = 1_000
"""Trajectories of one FinishRequest."""
GROUPS_AT_ONCE = 10_000
"""Groups of one TrainRequest."""
StoredJson = Annotated[Json, AfterValidator(_storable)]
"""A JSON value that comes back as it went in."""
CallWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def name_at(model: str, step: int) -> str:
    """What a call's `model` says for a fixed step of a model, and what its adapter is called in the sampler."""
    return f"{model}@{step}"


class Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Health(Wire):
    status: Literal["ok", "starting", "failed"]
    version: str
    base_model: str
    engine: str
    pid: int
    detail: str | None = None
    in_flight: int = 0  # calls in the engine
    restarts: int = 0  # of the sampler
    loop_lag: float = 0.0  # seconds for which the server answered nobody: the 99th percentile of the last minute
    wrong_answers: int = 0  # of the sampler: they did not fit their request, and their calls failed
    learner: dict[str, str] = {}  # device, precision, loader, mask probe: once its process is loaded


class RegisterRequest(Wire):
    """Make a trainable model, or find it. Another base model or LoRA shape under the same name is a 409."""

    name: Name
    project: Name = "default"
    base_model: str = Field(min_length=1)
    lora: LoraOptions | None = None  # None: whatever it has, or the defaults


class ModelState(Wire):
    name: str
    project: str
    base_model: str
    step: int
    lora: LoraOptions
    checkpoint: str | None  # folder of the newest step; None at step 0


class ForkRequest(Wire):
    """Make model `name` start from step `from_step` (default: newest) of the model in the URL."""

    name: Name
    project: Name | None = None
    from_step: int | None = Field(default=None, ge=0)


class LogRequest(Wire):
    """Metrics of the user's own, kept with the model."""

    split: str = Field(default="val", min_length=1, max_length=64)
    step: int | None = Field(default=None, ge=0)
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)
    trajectory_ids: tuple[str, ...] = ()


class UserState(Wire):
    """A JSON object of the user's own, kept with the model."""

    value: dict[str, StoredJson] = Field(default_factory=dict)


class CheckpointState(Wire):
    step: int
    path: str
    created_at: float
    request_id: str | None
    metrics: dict[str, float]


ExportFormat = Literal["peft", "merged", "gguf-ready"]
"""The LoRA alone; base and LoRA as one model; that as llama.cpp's converter reads it."""


class ExportRequest(Wire):
    format: ExportFormat = "peft"
    output: str = Field(min_length=1)  # folder on the server's machine; must not exist


class ExportResult(Wire):
    path: str
    format: str
    step: int


class ArchiveRequest(Wire):
    format: ExportFormat = "peft"


class ArchiveState(Wire):
    """An export as one tar of regular files. `size` in bytes; `sha256` of the whole tar, in hex."""

    id: str
    size: int
    sha256: str


class TrajectoryRecord(Wire):
    """A finished rollout. `calls=None`: every call recorded under `id`; else exactly these, which it claims."""

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
    call_rewards: dict[str, FiniteFloat] = Field(default_factory=dict)  # by call id: what was earned after it
    unused: tuple[str, ...] = ()  # ids of calls whose output was thrown away
    tool_runs: tuple[ToolRun, ...] = ()  # in order of start; records of older versions have none
    started_at: UnixSeconds
    ended_at: UnixSeconds
    place: RolloutPlace = RolloutPlace()

    @field_validator("histories")
    @classmethod
    def _targets_are_answers(cls, histories: tuple[RenderedHistory, ...]) -> tuple[RenderedHistory, ...]:
        for history in histories:
            for target in history.targets:
                if not 0 <= target < len(history.messages):
                    raise ValueError(f"targets holds {target}, but there are {len(history.messages)} messages")
                if (role := history.messages[target].get("role")) != "assistant":
                    raise ValueError(
                        f"targets holds {target}, a message of role {role!r}: only an assistant's is trained"
                    )
            for at, message in enumerate(history.messages):
                if not (_is_content(message.get("content")) and _are_tool_calls(message.get("tool_calls"))):
                    raise ValueError(
                        f"messages[{at}] is no chat message: content is text or parts, tool_calls functions"
                    )
        return histories


def _is_content(value: Json) -> bool:
    parts = cast(list[Json], value) if isinstance(value, list) else None
    return isinstance(value, str | None) or (parts is not None and all(isinstance(part, str | dict) for part in parts))


def _are_tool_calls(value: Json) -> bool:
    calls = cast(list[dict[str, Json]], value) if isinstance(value, list) else None
    shaped = calls is not None and all(isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls)  # pyright: ignore[reportUnnecessaryIsInstance]  # as sent
    return value is None or shaped


class FinishRequest(Wire):
    """Finishing seals: later calls under the id are answered, recorded as late and never trained.
    Finishing the same id again replaces its reward, metrics, metadata and logs."""

    trajectories: tuple[TrajectoryRecord, ...] = Field(min_length=1, max_length=FINISHED_AT_ONCE)


class FinishResult(Wire):
    calls: dict[str, int]  # recorded calls per trajectory id
    expired: dict[str, int] = {}  # calls recorded under an id that nobody claimed in time, and that are gone


class TrajectoryQuery(Wire):
    """Which finished trajectories to list; those that fit every filter. `after` is a page's `next`."""

    model: str | None = Field(default=None, min_length=1)  # one that it called, or that it was finished for
    run: str | None = Field(default=None, min_length=1)
    split: str | None = Field(default=None, min_length=1)
    step: int | None = Field(default=None, ge=0, lt=2**31)
    scenario: str | None = Field(default=None, min_length=1)
    group: str | None = Field(default=None, min_length=1)
    scored: bool | None = None  # whether it has a reward
    failed: bool | None = None  # whether an exception ended it
    limit: int = Field(default=100, ge=1, le=10_000)
    after: str | None = Field(default=None, pattern=r"^[0-9]{1,18}$")


class TrajectoryPage(Wire):
    """The trajectory that was finished last comes first. What is finished while pages are read comes before the first page;
    finishing a trajectory again leaves it where it was. `next`: opaque; None on the last page."""

    trajectories: tuple[TrajectoryRecord, ...]
    next: str | None = None


class TrajectoryWithCalls(Wire):
    trajectory: TrajectoryRecord | None  # None: not finished yet
    calls: tuple[Call, ...]


class OutputTrace(Wire):
    """One choice of a call with counts in place of its tokens. Logprobs in nats; None where none was recorded."""

    index: int
    message: Message
    finish_reason: str | None
    status: CallStatus
    parse_failure: bool
    tokens: int
    logprob_mean: float | None
    logprob_min: float | None


class CallTrace(Wire):
    """A recorded call as trace sinks show it: everything but its token arrays."""

    id: str
    trajectory_id: str
    model: str
    step: int
    status: CallStatus
    sampling: Sampling
    constrained: str | None
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None
    prompt_tokens: int
    outputs: tuple[OutputTrace, ...]
    origin: CallOrigin | None
    error: str | None
    late: bool
    started_at: float
    ended_at: float


class RolloutTrace(Wire):
    """A finished trajectory and its calls in order of start."""

    record: TrajectoryRecord
    calls: tuple[CallTrace, ...]


class TracePage(Wire):
    """In the order of a TrajectoryPage. `next`: opaque; None on the last page."""

    rollouts: tuple[RolloutTrace, ...]
    next: str | None = None


class GroupRecord(Wire):
    """Rollouts of one scenario, by the ids of finished trajectories."""

    trajectory_ids: tuple[str, ...]
    metadata: dict[str, StoredJson] = Field(default_factory=dict)
    metrics: dict[str, FiniteFloat] = Field(default_factory=dict)


class TrainRequest(Wire):
    """Applied at most once per id: sent again, it joins the running step or returns the stored result."""

    id: str = Field(default_factory=lambda: new_id("train"), min_length=1, max_length=200)
    model: str
    groups: tuple[GroupRecord, ...] = Field(min_length=1, max_length=GROUPS_AT_ONCE)
    config: TrainConfig = Field(default_factory=TrainConfig)


class TrainEvent(Wire):
    """`phase` progress carries `done` of `total`; the last event has `result` or `error`."""

    kind: Literal["progress", "warning", "result", "error"]
    phase: str = ""
    done: int = 0
    total: int = 0
    message: str = ""
    result: TrainResult | None = None
    error: dict[str, Json] | None = None  # {"message", "code", "param"}: code is TrainError.reason


class TrainStatus(Wire):
    id: str
    model: str
    state: Literal["queued", "running", "done", "failed", "interrupted"]
    result: TrainResult | None = None
    error: str | None = None
