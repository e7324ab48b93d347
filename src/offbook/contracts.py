"""The protocols that plugins and users implement, with their failure policies, and the events of trace sinks.

The `id` of an event is deterministic: rebuilding the event from the server's records yields the same id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, TypeAlias, get_args, runtime_checkable

from .base.types import Json, Trajectory, TrajectoryGroup
from .base.types import RecordedError as RecordedError
from .base.types import ToolRun as ToolRun
from .base.wire import RolloutTrace


@dataclass(frozen=True)
class RunStarted:
    """A run starts, or resumes after a restart under the same id. `settings`: its options as JSON."""

    method: ClassVar[str] = "run_started"
    run: str
    model: str
    step: int
    at: float  # unix seconds
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def id(self) -> str:
        """The event's id: one for each run and model."""
        return f"{self.run}/{self.model}/started"


@dataclass(frozen=True)
class GroupsFinished:
    """Groups of rollouts ended. `groups`: ids; `rollouts`: the server's records; `step`: the policy's."""

    method: ClassVar[str] = "groups_finished"
    run: str
    split: str
    step: int
    groups: tuple[str, ...]
    rollouts: tuple[RolloutTrace, ...] = ()

    @property
    def id(self) -> str:
        """One per set of groups, in order."""
        return f"{self.run}/{self.split}/{self.step}/{digest(*self.groups)}"


@dataclass(frozen=True)
class EvaluationFinished:
    """A checkpoint was evaluated. `metrics`: means over the rollouts, by name."""

    method: ClassVar[str] = "evaluation_finished"
    run: str
    model: str
    split: str
    step: int
    at: float  # unix seconds
    metrics: Mapping[str, float]
    groups: tuple[str, ...] = ()
    rollouts: tuple[RolloutTrace, ...] = ()

    @property
    def id(self) -> str:
        """One per set of groups, in any order: the records list groups in order of their end."""
        groups = digest(*sorted(self.groups))
        return f"{self.run}/{self.model}/{self.split}/{self.step}/evaluation/{groups}"


@dataclass(frozen=True)
class StepFinished:
    """A train request was answered. `step`: the model's afterwards; `began`: the step at which its rollouts began.
    `metrics`: see docs/metrics.md. `untrained`: identifies a request that changed nothing, else ""."""

    method: ClassVar[str] = "step_finished"
    split: ClassVar[str] = "train"  # where tools show its metrics, as those of an evaluation under its split
    run: str
    model: str
    step: int
    began: int
    at: float  # unix seconds
    metrics: Mapping[str, float]
    untrained: str = ""

    @property
    def id(self) -> str:
        """One per step, and one per request that changed nothing."""
        return f"{self.run}/{self.model}/{self.step}/step{self.untrained and f'/{self.untrained}'}"


@dataclass(frozen=True)
class CheckpointSaved:
    """A LoRA was written. `path`: folder, on this machine if the sink has `checkpoint_files`, else on the server."""

    method: ClassVar[str] = "checkpoint_saved"
    run: str
    model: str
    step: int
    path: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def id(self) -> str:
        """One per step."""
        return f"{self.run}/{self.model}/{self.step}/checkpoint"


@dataclass(frozen=True)
class Alert:
    """A metric crossed its limit, which suggests that the run fails. `message`: what to look at."""

    method: ClassVar[str] = "alert"
    run: str
    model: str
    step: int
    at: float  # unix seconds
    kind: str
    message: str
    value: float
    limit: float

    @property
    def id(self) -> str:
        """One per step and kind."""
        return f"{self.run}/{self.model}/{self.step}/alert/{self.kind}"


TraceEvent: TypeAlias = RunStarted | GroupsFinished | EvaluationFinished | StepFinished | CheckpointSaved | Alert
"""The events that a trace sink receives. `method`: the method of `TraceSink` that receives it."""

EVENT_KINDS: tuple[type[TraceEvent], ...] = get_args(TraceEvent)


class DeliveryError(RuntimeError):
    """A server did not accept spans. The message has its response."""


class RejectedError(DeliveryError):
    """A server accepted a request, but rejected some of its spans or scores. It would reject them again."""


@runtime_checkable
class TraceSink(Protocol):
    """Sends rollouts and steps to a tracing tool. Subclass it and override the methods that the tool supports.

    Every sink has its own background thread, which calls the methods in order; they may block. After a failure or a
    restart, an event is delivered again with the same id, so handling it must be idempotent. Each kind of exception is
    logged once and never stops training. The event is delivered again later, except after a `RejectedError`. `name`:
    the sink's name in messages. `checkpoint_files`: whether `CheckpointSaved.path` must be a folder on
    this machine.
    """

    name: str
    checkpoint_files: bool = False

    def check(self) -> None:
        """Called before the run, which waits up to ten seconds. Raise ConfigError if the credentials are rejected,
        which ends the run. ConnectionError (the tool does not respond) and other exceptions only cause a warning."""
        return

    def run_started(self, event: RunStarted) -> None:
        """A run starts or resumes."""
        del event

    def groups_finished(self, event: GroupsFinished) -> None:
        """Rollouts of a split have ended. Send each rollout under its own id."""
        del event

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        """A checkpoint was evaluated."""
        del event

    def step_finished(self, event: StepFinished) -> None:
        """A train request was answered."""
        del event

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """A LoRA was written."""
        del event

    def alert(self, event: Alert) -> None:
        """A metric crossed its limit."""
        del event

    def closed(self) -> None:
        """The run has ended: flush buffered events. Another run may follow."""
        return


class Judge(Protocol):
    """Scores the rollouts of a group. After a failure it is called once more; then the group is dropped and counted.
    Returning None drops the group too."""

    def __call__(self, group: TrajectoryGroup) -> Awaitable[TrajectoryGroup | None]: ...


class RolloutRunner(Protocol):
    """Runs a Trainer's rollouts in other processes; without one they run in the Trainer's own.

    `rollout(model, scenario)` returns the trajectory; `model` is a tuple if the Trainer has several. A TrainableModel can be
    pickled: in another process it uses the same server. What the rollout raises is raised, an error of another process as
    `RecordedError`.
    """

    async def slots(self) -> int:
        """How many rollouts can run at once: no more are started, so that their time limit starts when they do."""
        ...

    async def run(self, rollout: Callable[[Any, Any], Awaitable[Trajectory]], model: Any, scenario: Any) -> Trajectory:
        """Run one rollout and return its trajectory."""
        ...


@runtime_checkable
class RolloutState(Protocol):
    """A rollout that counts something in the Trainer's process: a runner returns it from the process that ran the rollout."""

    def collected(self) -> object:
        """Called after the rollout, in a process of its own. The value must be picklable."""
        ...

    def collect(self, collected: Any) -> None:
        """Called in the Trainer's process, with what `collected` returned."""
        ...


def digest(*parts: str) -> str:
    """16 hex digits of the SHA-256 of `parts`, the same in every process."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
