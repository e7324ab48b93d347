"""The active capture of a context: which chat model calls are redirected, to which model, and under which trajectory."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Literal
from uuid import UUID

from langchain_core.language_models import BaseChatModel

from offbook import Trajectory
from offbook.base.errors import CaptureError
from offbook.base.types import CallOrigin
from offbook.client.rollouts.capture import enter_captures, inside, is_outside
from offbook_langgraph.chat_model import ChatOffbook

from .origins import (
    EXCLUDED,
    JUDGED,
    OWN_MODEL,
    CallLabels,
    CapturedCall,
    OriginCounts,
    Predicate,
    call_origin,
    described,
    warn_judge,
)
from .own_code import OwnRun, own_methods, own_run, stays
from .provider_formats import kept_settings
from .recorded_calls import RecordedCalls
from .run_tree import CallSite, RunTree, enclosing_run

Scope = Literal["context", "process"]
"""Which code a capture sees: this context with the tasks and threads started from it, or the whole process."""
OnLeak = Literal["error", "warn", "ignore"]
"""What happens when a request to another LLM bypasses the capture."""
SharedState = Literal["error", "allow"]
"""Whether two rollouts may use one checkpointer thread or one store namespace."""


@dataclass(frozen=True)
class CallRoute:
    """Sends the calls that `select` accepts to `target`; `select=None` accepts all."""

    target: ChatOffbook
    select: Predicate | None = None


@dataclass(frozen=True, eq=False)
class ActiveCapture:
    """A capture while its block runs.

    A call goes to the first of `routes` that accepts it and is recorded under `trajectory`. A call that no route accepts
    goes to the enclosing capture, else to the app's own model. A capture without routes only observes: calls that `watches`
    accepts stay on the app's own model. `runs` receives LangChain's events. `faults` collects capture errors, because the
    app may swallow them. `calls` are those that a route without a selection took. `over` is non-empty once the block has ended (the class is frozen).
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
    calls: list[CapturedCall] = field(default_factory=list[CapturedCall])
    over: list[bool] = field(default_factory=list[bool])
    process_id: int = field(default_factory=os.getpid)

    @property
    def ended(self) -> bool:
        """Whether the block has ended. Threads and tasks that outlive the block still see the capture."""
        return bool(self.over)

    @property
    def trajectory_id(self) -> str | None:
        """Id of the trajectory under which calls are recorded; None if they are not recorded."""
        return self.trajectory.id if self.trajectory is not None else None

    def stand_in(self, original: BaseChatModel, labels: CallLabels) -> ChatOffbook | None:
        """The chat model that answers one call of `original`; None when `original` answers it.

        Tries this capture, then the enclosing ones. Raises CaptureError for a call that no capture may let through.
        """
        origin = self.origin_of(original, labels)
        chosen, unmatched = self.choose(origin, original)
        if chosen is not None:
            capture, route = chosen
            return capture.answerer(route, original, origin)
        run = own_run()
        if run is not None and not self.excludes(origin, original):
            return run.answer_for(original)
        for capture in unmatched:
            capture.count_own_model(origin, original)
        return None

    def own_run(self, original: BaseChatModel, labels: CallLabels) -> OwnRun | None:
        """The run of the app's own code for a call of `original`, whose calls go where the call itself would go; None when
        its calls are chosen one by one."""
        origin = self.origin_of(original, labels)
        chosen, unmatched = self.choose(origin, original)
        if chosen is None:
            excluded = [capture for capture in unmatched if capture.excludes(origin, original)]
            for capture in excluded:
                capture.count_own_model(origin, original)
            return stays() if excluded else None
        capture, route = chosen

        def answerer(called: BaseChatModel) -> ChatOffbook:
            inner = origin if called is original else self.origin_of(called, labels)
            return capture.answerer(route, called, inner)

        return OwnRun(original, answerer)

    def choose(
        self, origin: CallOrigin, original: BaseChatModel
    ) -> tuple[tuple[ActiveCapture, CallRoute] | None, list[ActiveCapture]]:
        """The innermost capture that takes a call, with its route, if any; and the captures inside it, which do not."""
        unmatched: list[ActiveCapture] = []
        capture: ActiveCapture | None = self
        while capture is not None:
            route = capture.route(origin, original)
            if route is not None:
                return (capture, route), unmatched
            if capture.observes(origin, original):
                break
            unmatched.append(capture)
            capture = capture.outer
        return None, unmatched

    def answerer(self, route: CallRoute, original: BaseChatModel, origin: CallOrigin) -> ChatOffbook:
        """The trained model for one call of `original`, which is counted. Raises CaptureError after the end of the block."""
        self.check_alive()
        self.counts.add(route.target.model_name, origin)
        if route.select is None and self.trajectory is not None:
            self.calls.append(CapturedCall(origin, self.site().line))
        return self.target_for_call(route.target, original, origin)

    def origin_of(self, original: BaseChatModel, labels: CallLabels) -> CallOrigin:
        """The origin of a call."""
        return call_origin(original, labels, self.agent_of(enclosing_run(labels.callbacks)))

    def agent_of(self, run: UUID | None) -> str | None:
        """Name of the agent that a run belongs to.

        A capture that began inside a run has not seen the runs above it, so the enclosing captures are asked next.
        """
        capture: ActiveCapture | None = self
        while capture is not None:
            name = capture.runs.agent_of(run)
            if name is not None:
                return name
            capture = capture.outer
        return None

    def site(self, callbacks: object = None) -> CallSite:
        """Where the app makes the call that is being made. `callbacks`: see `enclosing_run`."""
        return self.runs.site_of(enclosing_run(callbacks))

    def count_own_model(self, origin: CallOrigin, original: BaseChatModel) -> None:
        """Count a call that stays on the app's own model.

        Raises CaptureError when several models are trained and `exclude` does not name the call: it would cost money.
        """
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

    def count_judge(self, package: str, original: BaseChatModel, labels: CallLabels) -> None:
        """Count a call of an evaluation package, which stays on the app's own model. Logs the first of each package."""
        warn_judge(package)
        self.counts.add(JUDGED, self.origin_of(original, labels))

    def check_alive(self) -> None:
        """Raise CaptureError for a call after the block's end, or from a forked process, which must not use its parent's
        connections."""
        if self.ended:
            raise CaptureError(
                f"the rollout {self.trajectory_id} to which this call belongs has ended: it was made by a task or thread that "
                "the rollout left behind. Wait for them in the rollout; a worker that serves several rollouts must be started "
                'before them, with scope="process"'
            )
        if self.process_id != os.getpid():
            raise CaptureError(
                "a forked process cannot share its parent's capture: give it the server's URL /t/<trajectory id>/v1, with the "
                "id of offbook.current_trajectory()"
            )

    def route(self, origin: CallOrigin, original: BaseChatModel) -> CallRoute | None:
        """The first route that accepts the call; None if there is none or `exclude` names the call."""
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
        """Whether this capture only observes, and observes this call."""
        return not self.routes and (self.watches is None or self.watches(origin, original))

    def target_for_call(self, target: ChatOffbook, original: BaseChatModel, origin: CallOrigin) -> ChatOffbook:
        """A copy of the target with the settings of `original` and the labels of this call."""
        label = {"fit": True, "cache": False, "trajectory_id": self.trajectory_id, "origin": origin}
        stand_in = target.model_copy(update=kept_settings(original) | label)
        stand_in.with_methods(own_methods(original))
        if isinstance(self.runs, RecordedCalls):
            stand_in.on_recorded(partial(self.runs.note, origin=origin))
        return stand_in


_active: ContextVar[ActiveCapture | None] = ContextVar("offbook_langgraph_capture", default=None)
_process_captures: list[ActiveCapture] = []


def active() -> ActiveCapture | None:
    """The active capture of this context; None outside captures and inside `offbook.outside`."""
    if is_outside():
        return None
    return _active.get() or (_process_captures[-1] if _process_captures else None)


class ActiveHandler:
    """Acts as a ContextVar for LangChain's configure hooks. LangChain adds its value, the active capture's callback handler,
    to every run, even when the app passes `callbacks: []`."""

    def get(self) -> RunTree | None:
        """The active capture's callback handler."""
        capture = active()
        return capture.runs if capture is not None else None


def activate(capture: ActiveCapture) -> None:
    """Activate `capture` in this context without an end. Use it only in a copied context that is discarded afterwards."""
    enter_captures()
    _active.set(capture)


@contextmanager
def activated(capture: ActiveCapture, scope: Scope = "context") -> Generator[ActiveCapture]:
    """Activate `capture` inside the block; `patches.install` must have run.

    Raises CaptureError for a second capture with scope="process": a thread's call could belong to either.
    """
    if scope == "process":
        if _process_captures:
            raise CaptureError(
                'scope="process": another such capture is active, and a thread could belong to either: run one rollout '
                "at a time (concurrency=1), or one in each process"
            )
        _process_captures.append(capture)
    previous = _active.get()
    _active.set(capture)
    try:
        with inside():
            yield capture
    finally:
        if scope == "process":
            _process_captures.remove(capture)
        if capture.trajectory is not None:  # without one (a served app), tasks that outlive the block may go on calling
            capture.over.append(True)
        current = _active.get()  # blocks inside generators may end in any order
        while current is not None and (current is capture or current.ended):
            current = previous if current is capture else current.outer
        _active.set(current)
