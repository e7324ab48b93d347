"""Which calls of the running code are redirected, where to, and under which trajectory."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from uuid import UUID

from langchain_core.language_models import BaseChatModel

from understudy import Trajectory
from understudy.integration import CallOrigin, CaptureError

from .chat_model import ChatUnderstudy
from .ledger import Ledger
from .origin_counts import EXCLUDED, OWN_MODEL, OriginCounts, described
from .origins import call_origin
from .runs import RunTree, surrounding_run
from .selection import Predicate
from .settings import carried

Scope = Literal["context", "process"]
"""Which code a capture sees: this context with the tasks and threads started from it, or all of the process."""
OnLeak = Literal["error", "warn", "ignore"]
SharedState = Literal["error", "allow"]


@dataclass(frozen=True)
class CallRoute:
    """Calls that `select` agrees to go to `target`; None agrees to all."""

    target: ChatUnderstudy
    select: Predicate | None = None


@dataclass(frozen=True, eq=False)
class ActiveCapture:
    """While it is active, a call goes to the first route that takes it, under `trajectory`; one that none takes goes to
    the enclosing capture, or else to the app's own model. `runs` hears LangChain's events; a capture without routes
    only watches, and what it selects stays on the app's own model. `faults` are errors that the app may have swallowed.
    """

    routes: tuple[CallRoute, ...] = ()
    trajectory: Trajectory | None = None
    runs: RunTree = field(default_factory=RunTree)
    counts: OriginCounts = field(default_factory=OriginCounts)
    exclude: Predicate | None = None
    watches: Predicate | None = None
    on_leak: OnLeak = "ignore"
    shared_state: SharedState = "allow"
    outer: ActiveCapture | None = None
    faults: list[CaptureError] = field(default_factory=list[CaptureError])
    over: list[bool] = field(default_factory=list[bool])
    process_id: int = field(default_factory=os.getpid)

    @property
    def ended(self) -> bool:
        """Whether its block is over: threads and tasks that the block left behind still see it."""
        return bool(self.over)

    @property
    def trajectory_id(self) -> str | None:
        """Under which its calls are recorded; None: they are not."""
        return self.trajectory.id if self.trajectory is not None else None

    def stand_in(
        self,
        original: BaseChatModel,
        tags: list[str] | None,
        metadata: Mapping[str, Any] | None,
        callbacks: object,
    ) -> ChatUnderstudy | None:
        """A copy of the target for one call of `original`; None when the call stays where it is."""
        agent = self.agent_of(surrounding_run(callbacks))
        origin = call_origin(original, tags, metadata, callbacks, agent)
        passed: list[ActiveCapture] = []
        capture: ActiveCapture | None = self
        while capture is not None:
            route = capture.route(origin, original)
            if route is not None:
                capture.check_alive()
                capture.counts.add(route.target.model_name, origin)
                return capture.made(route.target, original, origin)
            if capture.observes(origin, original):
                break
            passed.append(capture)
            capture = capture.outer
        for each in passed:
            each.pass_on(origin, original)
        return None

    def agent_of(self, run: UUID | None) -> str | None:
        """The agent in which a run is. A capture that began inside a run knows nothing of those above it; those around it do."""
        capture: ActiveCapture | None = self
        while capture is not None:
            name = capture.runs.agent_of(run)
            if name is not None:
                return name
            capture = capture.outer
        return None

    def pass_on(self, origin: CallOrigin, original: BaseChatModel) -> None:
        """Count a call that stays on the app's own model. Raises CaptureError where several models are trained and nothing
        says that it should: it would cost money."""
        excluded = self.excludes(origin, original)
        self.counts.add(EXCLUDED if excluded else OWN_MODEL, origin)
        if excluded or len(self.routes) < 2 or self.trajectory is None or self.ended:
            return
        names = ", ".join(route.target.model_name for route in self.routes)
        raise CaptureError(
            f"no selection takes the call of {described(origin)}, so it would go to the app's own model and cost money. "
            f"Select it for one of {names} in model={{...}}, or add it to exclude= and it stays there. The calls so far:\n"
            f"{self.counts.lines()}"
        )

    def check_alive(self) -> None:
        """Raises CaptureError for a call that came too late, or from a forked process, whose connections are its parent's."""
        if self.ended:
            raise CaptureError(
                f"the rollout {self.trajectory_id} to which this call belongs has ended: it was made by a task or thread that "
                "the rollout left behind. Wait for them in the rollout; a worker that serves several rollouts must be started "
                'before them, with scope="process"'
            )
        if self.process_id != os.getpid():
            raise CaptureError(
                "a forked process cannot share its parent's capture: give it the server's URL /t/<trajectory id>/v1, with the "
                "id of us.current_trajectory()"
            )

    def route(self, origin: CallOrigin, original: BaseChatModel) -> CallRoute | None:
        """The first route that takes the call."""
        if self.excludes(origin, original):
            return None
        for route in self.routes:
            if route.select is None or route.select(origin, original):
                return route
        return None

    def excludes(self, origin: CallOrigin, original: BaseChatModel) -> bool:
        """Whether `exclude=` names the call."""
        return self.exclude is not None and self.exclude(origin, original)

    def observes(self, origin: CallOrigin, original: BaseChatModel) -> bool:
        """Whether the call is meant to stay on the app's own model and be watched."""
        return not self.routes and (self.watches is None or self.watches(origin, original))

    def made(self, target: ChatUnderstudy, original: BaseChatModel, origin: CallOrigin) -> ChatUnderstudy:
        """The target for one call of `original`."""
        given = {"fit": True, "cache": False, "trajectory_id": self.trajectory_id, "origin": origin}
        made = target.model_copy(update=carried(original) | given)
        if isinstance(self.runs, Ledger):
            made.on_recorded(partial(self.runs.note, origin=origin))
        return made

    def heard_by(self, runs: RunTree, outer: ActiveCapture | None) -> ActiveCapture:
        """The same, heard by `runs`, inside of `outer`."""
        return replace(self, runs=runs, outer=outer)


OFF = ActiveCapture()
"""Active where nothing is captured, inside of a capture."""

_active: ContextVar[ActiveCapture | None] = ContextVar("understudy_langgraph_capture", default=None)
_of_process: list[ActiveCapture] = []


def active() -> ActiveCapture | None:
    """The capture that is active here."""
    found = _active.get() or (_of_process[-1] if _of_process else None)
    return None if found is OFF else found


class ActiveHandler:
    """Stands for a ContextVar in LangChain's configure hooks: the handler of the capture that is active, which LangChain
    adds to every run, also where the app gives `callbacks: []`."""

    def get(self) -> RunTree | None:
        capture = active()
        return capture.runs if capture is not None else None


def activate(capture: ActiveCapture) -> None:
    """Make `capture` the active one in this context, for good: for contexts that are thrown away."""
    _active.set(capture)


@contextmanager
def activated(capture: ActiveCapture, scope: Scope = "context") -> Generator[ActiveCapture]:
    """Make `capture` the active one; the patches must be installed. Raises CaptureError for a second one of the process:
    nobody could say which of the two a thread's call belongs to."""
    if scope == "process":
        if _of_process:
            raise CaptureError(
                'scope="process": another such capture is active, and a thread could belong to either: run one rollout '
                "at a time (concurrency=1), or one in each process"
            )
        _of_process.append(capture)
    before = _active.get()
    _active.set(capture)
    try:
        yield capture
    finally:
        if scope == "process":
            _of_process.remove(capture)
        if capture.trajectory is not None:  # tasks that a served app leaves behind go on with their calls
            capture.over.append(True)
        now = _active.get()  # blocks inside generators may end in another order than that of their beginnings
        while now is not None and (now is capture or now.ended):
            now = before if now is capture else now.outer
        _active.set(now)


@contextmanager
def uncaptured() -> Generator[None]:
    """Inside, chat models are the app's own again: for a judge or a simulated user in the middle of a rollout."""
    with activated(OFF):
        yield
