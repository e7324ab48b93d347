"""Which recorded traffic trained which step, asked in both directions, and its removal: the types that server and client share."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from offbook.base.wire import Wire

AUDITED_AT_ONCE = 10_000
"""Most trajectories and threads of one request."""
Id = Annotated[str, Field(min_length=1, max_length=200)]
ThreadId = Annotated[str, Field(min_length=1, max_length=1000)]


class AuditRequest(Wire):
    """Trajectories by their ids, or by the app's own names of threads of `route`, by default the server's."""

    trajectory_ids: tuple[Id, ...] = Field(default=(), max_length=AUDITED_AT_ONCE)
    thread_ids: tuple[ThreadId, ...] = Field(default=(), max_length=AUDITED_AT_ONCE)
    route: str | None = Field(default=None, min_length=1, max_length=200)

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if not (self.trajectory_ids or self.thread_ids):
            raise ValueError("name trajectory_ids or thread_ids")
        return self


class AuditedTrajectory(Wire):
    """A trajectory of a train request, with its calls. `recorded=False`: it was deleted since, so its calls are unknown."""

    id: str
    thread_id: str | None = None
    run: str | None = None
    recorded: bool = True
    calls: tuple[str, ...] = ()


class StepAudit(Wire):
    """What trained a step: the trajectories of its train request. One that the learner left out, such as those of a group of
    equal rewards, is named too.

    `after`: the steps that it goes on from, newest first. `unrecorded`: those of them, and itself, whose train requests are
    not in the records, such as an imported adapter."""

    model: str
    step: int
    request_id: str | None = None
    trajectories: tuple[AuditedTrajectory, ...] = ()
    after: tuple[str, ...] = ()
    unrecorded: tuple[str, ...] = ()


class TrajectoryAudit(Wire):
    """What a trajectory trained. `derived`: trajectories that were made from it: runs of a scenario that has its id, and examples
    with its conversation. `trained`: the steps whose train requests had it or one of these. `seen_since`: by model, the first
    step that goes on from one of them; all later ones do too."""

    id: str
    recorded: bool
    derived: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    seen_since: dict[str, int] = Field(default_factory=dict)


class Removal(Wire):
    """What a removal deleted, and what its trajectories had trained. `erased`: the file of the records holds no rest of it, either;
    otherwise a reader or a full disk was in the way."""

    trajectories: tuple[TrajectoryAudit, ...]
    records: int
    calls: int
    files: int
    erased: bool
