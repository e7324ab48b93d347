"""The narrow protocols that plugins and users implement, each with its failure policy, and the events of trace sinks."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from .types import Json, TrajectoryGroup
from .wire import RolloutTrace


@dataclass(frozen=True)
class RunStarted:
    """A run begins, or goes on after a restart under the same id. `settings`: its options as JSON."""

    run: str
    model: str
    step: int
    at: float  # unix seconds
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])

    @property
    def id(self) -> str:
        return f"{self.run}/{self.model}/started"


@dataclass(frozen=True)
class GroupsFinished:
    """Groups of rollouts, as the server keeps them. `step` is the policy's when they began."""

    run: str
    split: str
    step: int
    groups: tuple[str, ...]
    rollouts: tuple[RolloutTrace, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.run}/{self.split}/{self.step}/{digest(*self.groups)}"


@dataclass(frozen=True)
class EvaluationFinished:
    """An evaluation of a checkpoint: its means by name, and its rollouts."""

    run: str
    model: str
    split: str
    step: int
    at: float
    metrics: Mapping[str, float]
    groups: tuple[str, ...] = ()
    rollouts: tuple[RolloutTrace, ...] = ()

    @property
    def id(self) -> str:
        groups = digest(*sorted(self.groups))  # the records list them as they ended
        return f"{self.run}/{self.model}/{self.split}/{self.step}/evaluation/{groups}"


@dataclass(frozen=True)
class StepFinished:
    """A train request was answered; `step` is the model's afterwards, `began` the one with which its rollouts began.
    `metrics`: see docs/metrics.md. `untrained`: names a request that changed nothing; "" where a step was made."""

    run: str
    model: str
    step: int
    began: int
    at: float
    metrics: Mapping[str, float]
    untrained: str = ""

    @property
    def id(self) -> str:
        return f"{self.run}/{self.model}/{self.step}/step{self.untrained and f'/{self.untrained}'}"


@dataclass(frozen=True)
class CheckpointSaved:
    """A LoRA was written. `path`: the folder on this machine where the sink asks for files, else on the server's."""

    run: str
    model: str
    step: int
    path: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def id(self) -> str:
        return f"{self.run}/{self.model}/{self.step}/checkpoint"


@dataclass(frozen=True)
class Alert:
    """A sign that a run goes wrong: the metric's value, the limit it crossed, and what to look at."""

    run: str
    model: str
    step: int
    at: float
    kind: str
    message: str
    value: float
    limit: float

    @property
    def id(self) -> str:
        return f"{self.run}/{self.model}/{self.step}/alert/{self.kind}"


TraceEvent: TypeAlias = RunStarted | GroupsFinished | EvaluationFinished | StepFinished | CheckpointSaved | Alert
"""Events carry ids that stay the same when they are made again from the server's records."""


@runtime_checkable
class TraceSink(Protocol):
    """Where rollouts and steps are shown. Subclass it and override what the tool can show.

    The methods are called in one background thread of the sink's own, in order, and may block. An event comes again
    after a failure or a restart, with the same id: showing it twice must leave one. What a method raises is warned
    about once per kind, and the event is delivered later; training never stops for it. `name`: of the sink in messages
    and notes. `checkpoint_files`: whether `CheckpointSaved.path` must be a folder on this machine.
    """

    name: str
    checkpoint_files: bool = False

    def check(self) -> None:
        """Raise ConfigError for credentials that the tool refuses, ConnectionError where it does not answer: before the
        run, within seconds."""
        return

    def run_started(self, event: RunStarted) -> None:
        """A run begins, or goes on."""
        del event

    def groups_finished(self, event: GroupsFinished) -> None:
        """Rollouts of a split ended; show each under its own id."""
        del event

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        """A checkpoint was evaluated."""
        del event

    def step_finished(self, event: StepFinished) -> None:
        """A step's metrics."""
        del event

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """A LoRA was written."""
        del event

    def alert(self, event: Alert) -> None:
        """A sign that the run goes wrong."""
        del event

    def closed(self) -> None:
        """The run has ended: send what is held back. Another run may follow."""
        return


class Judge(Protocol):
    """Scores a group. One that fails is asked once more, then the group is dropped, counted; returning None drops it too."""

    def __call__(self, group: TrajectoryGroup) -> Awaitable[TrajectoryGroup | None]: ...


def digest(*parts: str) -> str:
    """16 hex digits of these texts, the same in every process."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
