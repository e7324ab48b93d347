"""The types that every part shares. `Call` is immutable; users fill in `Trajectory`, `TrajectoryGroup`, `History`."""

from __future__ import annotations

import math
import time
import traceback
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    field_serializer,
    field_validator,
)

from . import clock
from .choices import (
    as_choice,
    as_entry,
    as_message,
    is_choice,
    mark_of,
)
from .numbers import token_count, usd
from .redaction import Redaction, protect_environment
from .user_values import plain_text

Json: TypeAlias = Any
"""A JSON value, typed as Any: a recursive alias makes pydantic and editors slow."""
Message: TypeAlias = dict[str, Json]
"""One chat message in OpenAI's shape."""
Tool: TypeAlias = dict[str, Json]
"""One tool in OpenAI's shape: {"type": "function", "function": {...}}."""
if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam
    from openai.types.chat.chat_completion import Choice

    MessageOrChoice: TypeAlias = Choice | ChatCompletionMessageParam | Message
else:
    MessageOrChoice: TypeAlias = Any
Metric: TypeAlias = float | int | bool


def new_id(prefix: str) -> str:
    """A random, globally unique id such as `traj-5f0c...`. Ids have no order."""
    return f"{prefix}-{uuid.uuid4().hex}"


class CallStatus(StrEnum):
    """How a call ended, which decides whether its tokens may be trained."""

    COMPLETE = "complete"  # ended by a stop token, a stop string or a tool call
    TRUNCATED = "truncated"  # ended by max_tokens; still trained
    CANCELLED = "cancelled"  # the client disconnected; never trained
    FAILED = "failed"  # the engine gave no usable answer; never trained

    @property
    def usable(self) -> bool:
        """Whether the call has an output that can be trained."""
        return self in (CallStatus.COMPLETE, CallStatus.TRUNCATED)


CUT_OFF: Final = "length"
"""OpenAI's finish reason of an output that reached its token limit. The output's status is TRUNCATED."""


class Frozen(BaseModel):
    """Base of the immutable types. Unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that databases, orjson and trace formats can carry."""
TargetWeight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _count(value: object) -> object:
    return (token_count(value) or 0) if isinstance(value, int | float) else value


def _cost(value: object) -> object:
    return usd(value) if isinstance(value, int | float) else value


TokenCount = Annotated[int, BeforeValidator(_count)]
"""Tokens as another LLM's provider counted them. 0: unknown, also where it said what is no count."""
Cost = Annotated[FiniteFloat | None, BeforeValidator(_cost)]
"""USD. None: unknown, also where an amount cannot be."""
UnixSeconds = Annotated[float, Field(ge=0, lt=253_402_300_800, allow_inf_nan=False)]
"""A time between 1970 and 9999."""

GREEDY_BELOW = 1e-5
"""Below this temperature an engine decodes greedily (vLLM's own threshold)."""


class Sampling(Frozen):
    """The sampling settings of a call: the learner needs them to compute the same distribution."""

    temperature: FiniteFloat = 1.0
    top_p: FiniteFloat = 1.0
    top_k: Int64 = 0  # 0: off
    min_p: FiniteFloat = 0.0


class OutputFields(Frozen):
    """What a choice of a call says with its tokens (`CallOutput`) and without them (`OutputTrace`). `parse_failure`: tools
    were offered, and the text looks like a tool call but does not parse as one."""

    index: Int64
    message: Message
    finish_reason: str | None
    status: CallStatus = CallStatus.COMPLETE
    parse_failure: bool = False


class CallOutput(OutputFields):
    """One choice of a call. `logprobs[i]` is the logprob of `token_ids[i]` in nats: NaN if the engine gave none (null
    in JSON)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @field_validator("logprobs", mode="before")
    @classmethod
    def _missing(cls, values: Iterable[float | None]) -> tuple[float, ...]:
        """Missing logprobs become the object `math.nan`: tuples compare it by identity, so equal outputs are equal."""
        return tuple(math.nan if value is None or value != value else value for value in values)

    @field_serializer("logprobs", when_used="json")
    def _shown(self, values: tuple[float, ...]) -> list[float | None]:
        return [None if math.isnan(value) else value for value in values]


class CallOrigin(Frozen):
    """Where in the user's app a call was issued, as the adapter observed it."""

    node: str | None = None
    step: Int64 | None = None
    namespace: str | None = None
    agent: str | None = None
    thread: str | None = None
    model: str | None = None
    tags: tuple[str, ...] = ()
    kind: str | None = None  # class name of the app's chat model, such as "ChatOpenAI"
    source: str | None = None  # the framework's own label of the caller: LangChain's `lc_source`, "summarization"
    unused: bool = False  # the app discarded the output (a retry, a repeated node); set at the rollout's end


class CallFields(Frozen):
    """What a call says with its tokens (`Call`) and without them (`CallTrace`)."""

    id: str
    trajectory_id: str
    model: str
    step: Int64
    status: CallStatus
    sampling: Sampling
    constrained: str | None = None  # why the logprobs are not those of the policy alone (a grammar, a penalty, ...)
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None
    origin: CallOrigin | None = None
    error: str | None = None
    late: bool = False  # recorded after its trajectory was sealed; never trained
    started_at: UnixSeconds
    ended_at: UnixSeconds
    first_token_at: UnixSeconds | None = None  # None: the call was not streamed


class Call(CallFields):
    """One model call as the server recorded it: the messages, and the exact token ids that training uses."""

    allowed_texts: tuple[str, ...] = ()  # the answer had to be one of these, and nothing else constrained it
    prompt_ids: tuple[int, ...]
    outputs: tuple[CallOutput, ...]

    @property
    def beyond_text(self) -> bool:
        """Whether a message has an image, a sound or a file. `prompt_ids` say where it stands, not what it shows, so two
        calls with other images can have equal ids: such a call is never trained."""
        contents = (message.get("content") for message in self.messages)
        lists = (cast(list[Json], content) for content in contents if isinstance(content, list))
        return any(isinstance(part, dict) and "text" not in part for parts in lists for part in parts)


class OutputTrace(OutputFields):
    """One choice of a call, with a token count instead of token ids. Logprobs are in nats; None: not recorded."""

    tokens: TokenCount
    logprob_mean: float | None
    logprob_min: float | None


class CallTrace(CallFields):
    """A call without its token arrays, for trace sinks: recorded by the server, or answered by another LLM."""

    prompt_tokens: TokenCount
    outputs: tuple[OutputTrace, ...]
    cost: Cost = None

    def without_tokens(self) -> Call:
        """The same as a Call whose token arrays are empty: for what reads conversations."""
        outputs = tuple(
            CallOutput(token_ids=(), logprobs=(), **{name: getattr(output, name) for name in OutputFields.model_fields})
            for output in self.outputs
        )
        return Call(prompt_ids=(), outputs=outputs, **{name: getattr(self, name) for name in CallFields.model_fields})


class CallRef(Frozen):
    """A reference to one choice of one recorded call. A trajectory claims its calls by these."""

    call_id: str
    index: int = Field(default=0, ge=0, lt=2**31)


class ToolRun(BaseModel):
    """One execution of the tool call `tool_call_id` in a rollout, timed by the adapter that ran or observed it. A retry is
    another run with the same id.

    The arguments are in the model call that requested it. The result is in the messages of the next model call. Times are
    of the client's clock; those of model calls are of the server's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool_call_id: str
    name: str
    started_at: UnixSeconds
    ended_at: UnixSeconds
    error: str | None = None  # the error that the tool raised or reported
    result: str | None = None  # its text, if no recorded model call received it

    @field_validator("name", "error", "result", mode="before")
    @classmethod
    def _encodable(cls, text: object) -> object:
        """Replace lone surrogates, which UTF-8 cannot encode, by question marks."""
        return plain_text(text) if isinstance(text, str) else text


class RolloutException(Frozen):
    """The exception that ended a rollout."""

    type: str
    message: str
    traceback: str
    at: UnixSeconds | None = None


PlaceName = Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\x00]*$")]
"""A name in an indexed column. It has no NUL, and a length that is no burden on an index."""


class RolloutPlace(Frozen):
    """Run, split, step, scenario and group of a rollout; None: unknown. The group fills in missing fields."""

    run: PlaceName | None = None  # one call of Trainer.train or evaluate, or a name that several calls share
    split: PlaceName | None = None  # "train", "val", "val-sampled", or the user's own split
    step: int | None = Field(default=None, ge=0, lt=2**31)  # the (first) model's step when the iteration began
    scenario: PlaceName | None = None  # the scenario's id
    group: PlaceName | None = None  # id of its TrajectoryGroup; unique over all runs
    index: int | None = Field(default=None, ge=0, lt=2**31)  # in the group, from 0; failed rollouts count

    def filled(self, known: RolloutPlace, index: int | None = None) -> RolloutPlace:
        """A copy whose None fields are taken from `known`, and whose index, if None, is `index`."""
        values: dict[str, Json] = known.model_dump() | ({} if index is None else {"index": index})
        return RolloutPlace.model_validate(values | self.model_dump(exclude_none=True))


class History(BaseModel):
    """One conversation: messages, and the choices that the model sampled. Only the choices are trained; the messages
    are context."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    messages_and_choices: list[MessageOrChoice] = Field(default_factory=list[MessageOrChoice])
    tools: list[Tool] | None = None

    @field_validator("messages_and_choices", mode="plain")
    @classmethod
    def _as_they_are(cls, items: Any) -> list[MessageOrChoice]:
        """Keep messages as dicts: OpenAI's types would drop `reasoning_content` and turn tool calls into iterators."""
        if not isinstance(items, list | tuple):
            raise ValueError(f"a list of messages and choices is needed, got {type(items).__name__} {items!r:.80}")
        return [as_entry(item) for item in cast(Iterable[object], items)]

    @field_serializer("messages_and_choices", mode="wrap")
    def _written(self, items: list[MessageOrChoice], write: SerializerFunctionWrapHandler) -> Any:
        return write(self.entries())

    def entries(self) -> list[MessageOrChoice]:
        """The messages and choices. litellm's choices are converted to the OpenAI SDK's."""
        return [as_choice(item) or item for item in self.messages_and_choices]

    def messages(self) -> list[ChatCompletionMessageParam]:
        """The conversation as plain messages, for the next request."""
        return [as_message(item) for item in self.messages_and_choices]

    def call_refs(self) -> list[CallRef]:
        """The recorded calls that the choices carry, in order, without duplicates."""
        refs = [call_ref(item) for item in self.entries() if is_choice(item)]
        return list(dict.fromkeys(ref for ref in refs if ref is not None))


class RenderedHistory(Frozen):
    """A conversation without recorded calls, which the learner renders with the chat template and tokenises.
    `targets`: indexes into `messages` of the assistant messages to train on. `weights`: of each target; (): all 1.
    `source`: where it was read, for messages of errors, such as "data.jsonl, line 12"."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] | None = None
    targets: tuple[int, ...]
    weights: tuple[TargetWeight, ...] = ()
    source: str = ""


class Trajectory(History):
    """The result of a rollout: conversation, calls, reward, metrics, metadata, logs, or the exception that ended it."""

    id: str = Field(default_factory=lambda: new_id("traj"))
    additional_histories: list[History] = Field(default_factory=list[History])
    reward: float | None = None  # None: unscored, excluded from advantages
    metrics: dict[str, Metric] = Field(default_factory=dict[str, Metric])
    metadata: dict[str, Json] = Field(default_factory=dict[str, Json])
    logs: list[str] = Field(default_factory=list[str])
    exception: RolloutException | None = None
    captured: bool = False  # True: every call recorded under its id belongs to it
    weights: dict[str, float] = Field(default_factory=dict[str, float])  # by call id; 0: not trained; missing: 1
    call_rewards: dict[str, float] = Field(default_factory=dict[str, float])  # by call id: reward earned after the call
    unused: list[str] = Field(default_factory=list[str])  # ids of calls whose output the app discarded
    tool_runs: list[ToolRun] = Field(default_factory=list[ToolRun])  # in order of start, timed by the adapter
    outside_calls: list[CallTrace] = Field(default_factory=list[CallTrace])  # answered by another LLM; never trained
    started_at: float = Field(default_factory=clock.now)
    ended_at: float | None = None
    place: RolloutPlace = RolloutPlace()  # filled in by the functions that gather, train and log it

    @field_validator("reward")
    @classmethod
    def _finite(cls, reward: float | None) -> float | None:
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward must be a finite number or None (unscored), got {reward!r}")
        return reward

    @field_validator("weights")
    @classmethod
    def _not_negative(cls, weights: dict[str, float]) -> dict[str, float]:
        for call_id, weight in weights.items():
            if not 0 <= weight < math.inf:
                raise ValueError(f"weights[{call_id!r}] must be a finite number of at least 0, got {weight!r}")
        return weights

    def log(self, message: object) -> None:
        """Add a line to the trajectory's log. Values that are not text are converted with `str`."""
        self.logs.append(plain_text(message))

    def for_logging(self) -> dict[str, Json]:
        """Reward, metrics, metadata, logs and messages as JSON. The flag `trainable` marks the messages that the model
        sampled."""
        messages = [{**as_message(item), "trainable": is_choice(item)} for item in self.entries()]
        return self.model_dump(include={"reward", "metrics", "metadata", "logs"}) | {"messages": messages}

    def finish(self) -> Trajectory:
        """Set `ended_at` and the metric `duration` (seconds). Returns the trajectory itself."""
        self.ended_at = clock.end_of(self.started_at)
        self.metrics["duration"] = self.ended_at - self.started_at
        return self

    @asynccontextmanager
    async def track_duration(self, name: str) -> AsyncGenerator[None]:
        """Add the seconds spent in the block to the metric `{name}_duration`."""
        started = time.monotonic()
        try:
            yield
        finally:
            key = f"{name}_duration"
            self.metrics[key] = float(self.metrics.get(key, 0.0)) + time.monotonic() - started


PendingRollout: TypeAlias = Awaitable[Trajectory] | Callable[[], Awaitable[Trajectory]]
"""A rollout that has not run: an awaitable, or a callable that returns one (only a callable can be retried)."""


class TrajectoryGroup(BaseModel):
    """Rollouts of the same scenario. Advantages compare the rewards inside a group.

    Items are trajectories, exceptions, and awaitables or callables that return a trajectory. Awaitables and callables
    stay `pending` until `gather_trajectory_groups` runs them. Exceptions are moved to `exceptions`. `place`: where its
    rollouts belong: run, step, split and scenario."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    trajectories: list[Trajectory] = Field(default_factory=list[Trajectory])
    exceptions: list[RolloutException] = Field(default_factory=list[RolloutException])
    metadata: dict[str, Json] = Field(default_factory=dict[str, Json])
    metrics: dict[str, Metric] = Field(default_factory=dict[str, Metric])
    logs: list[str] = Field(default_factory=list[str])
    place: RolloutPlace = RolloutPlace()

    _pending: tuple[PendingRollout, ...] = PrivateAttr(default=())

    def __init__(
        self,
        trajectories: Iterable[Trajectory | BaseException | PendingRollout] = (),
        *,
        exceptions: Iterable[RolloutException | BaseException] = (),
        metadata: Mapping[str, Json] | None = None,
        metrics: Mapping[str, Metric] | None = None,
        logs: Iterable[str] = (),
        place: RolloutPlace | None = None,
    ) -> None:
        finished: list[Any] = []  # pydantic validates the user's items
        failed: list[Any] = [
            as_rollout_exception(item) if isinstance(item, BaseException) else item for item in exceptions
        ]
        pending: list[PendingRollout] = []
        for item in trajectories:
            if isinstance(item, BaseException):
                failed.append(as_rollout_exception(item))
            elif isinstance(item, Awaitable) or callable(item):
                pending.append(cast(PendingRollout, item))
            else:
                finished.append(item)
        super().__init__(
            trajectories=finished,
            exceptions=failed,
            metadata=metadata or {},
            metrics=metrics or {},
            logs=list(logs),
            place=place or RolloutPlace(),
        )
        self._pending = tuple(pending)

    def log(self, message: object) -> None:
        """Add a line to the group's log."""
        self.logs.append(plain_text(message))

    @property
    def pending(self) -> tuple[PendingRollout, ...]:
        """Rollouts that have not run yet."""
        return self._pending

    def take_pending(self) -> tuple[PendingRollout, ...]:
        """Remove the pending rollouts from the group and return them, for the caller to run."""
        pending, self._pending = self._pending, ()
        return pending

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]  # iterates over trajectories, not fields
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


class RecordedError(Exception):
    """An exception of another process, by its record there, which has its type, message and traceback."""

    def __init__(self, record: RolloutException) -> None:
        super().__init__(record)
        self.record = record

    def __str__(self) -> str:
        return f"{self.record.type}: {self.record.message}"


CUT = "cut at the length limit: "
"""Begins the note on the exception of a rollout whose model calls were truncated."""


def as_rollout_exception(error: BaseException) -> RolloutException:
    """The serialisable record of an exception, with its traceback and the current time, without keys.

    Its message ends with the exception's notes that begin with `CUT`: they explain a message such as `None`."""
    if isinstance(error, RecordedError):
        return error.record
    printed = traceback.TracebackException.from_exception(error)  # also of an exception whose own str() raises
    try:
        message = plain_text(error)
    except Exception:  # noqa: BLE001  # the user's class
        message = plain_text("".join(printed.format_exception_only()).strip())
    cut = [plain_text(note) for note in getattr(error, "__notes__", ()) if str(note).startswith(CUT)]
    message = " ".join([message, *(f"({note})" for note in cut)])
    protect_environment()
    shown = Redaction()
    text = shown.text(plain_text("".join(printed.format())))
    return RolloutException(type=type(error).__name__, message=shown.text(message), traceback=text, at=clock.now())


class Scenario(BaseModel):
    """One task, and the fields that are needed to judge its result. Extra fields are kept. `scenario["key"]` is
    `scenario.key`."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    prompt: str | None = None

    def __getitem__(self, name: str) -> Json:
        fields = {"id": self.id, "prompt": self.prompt} | (self.model_extra or {})
        if name not in fields:
            raise KeyError(f"{name!r}: the scenario has {', '.join(fields)}")
        return fields[name]


NoSignalKind = Literal[
    "equal_rewards", "none_good", "all_or_none_good", "truncated", "no_advantage", "same_as_teacher", "zero_gradient"
]
"""Why a step changed nothing."""


class TrainResult(Frozen):
    """The result of a train request. `step`: the model's step afterwards."""

    model: str
    step: int
    applied: bool
    reason: Literal["trained", "no_signal", "evaluated"] = "trained"
    no_signal: NoSignalKind | None = None
    why: str = ""  # explanation of `no_signal`
    metrics: dict[str, float] = Field(default_factory=dict)
    checkpoint: str | None = None  # folder on the server's machine
    request_id: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def checkpoint_path(self) -> str | None:
        """Alias of `checkpoint`, the name that other libraries use."""
        return self.checkpoint


def call_ref(choice: Choice) -> CallRef | None:
    """The recorded call that a choice carries. None: another endpoint answered."""
    if (mark := mark_of(choice)) is None:
        return None
    return CallRef(call_id=str(mark["call_id"]), index=int(cast(int, mark.get("index", choice.index))))


def recorded_under(choice: Choice) -> str | None:
    """Id of the trajectory under which the choice's call was recorded. None: another endpoint answered."""
    mark = mark_of(choice)
    return None if mark is None else str(mark["trajectory_id"])
