"""`observe`: a context manager that records chat model calls without redirecting them."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any
from uuid import UUID

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from offbook import Trajectory, current_trajectory
from offbook.base.errors import ConfigError
from offbook.base.redaction import error_text
from offbook.base.types import (
    Call,
    CallOrigin,
    CallOutput,
    CallStatus,
    CallTrace,
    as_rollout_exception,
)
from offbook.client.rollouts.capture import trace_of
from offbook.supervised.masking import Masking, TextFilter

from .active_capture import (
    ActiveCapture,
    OnLeak,
    Scope,
    activated,
    active,
)
from .capture_block import check_choice
from .conversations import (
    StartedCall,
    answers,
    output_of,
    show,
    started_call,
    tokens_of,
)
from .langchain_patches import install
from .origins import origin_of
from .run_tree import RunTree
from .selection import Selection, as_predicate


class observe:  # used like a function: `with observe() as trajectory`
    """Record the chat model calls of a block on the app's own models, whatever their provider. Needs no server.

    `with` and `async with` return a trajectory. When the block ends it has the conversations as plain messages and choices,
    for traces, scenarios and supervised warm starts.

    select, exclude: which calls (see `Selection`). A chat model that delegates to another one counts once.
    scope, on_leak: see `capture`; here the default is to warn about a leak.
    filter: replaces each text of the conversations; by default secrets that Offbook knows are masked, unless the environment
    variable OFFBOOK_REDACT is 0. The metric `masked_texts` counts the texts that changed.
    Raises ConfigError for an invalid option or a second use.
    """

    def __init__(
        self,
        *,
        select: Selection | None = None,
        exclude: Selection | None = None,
        scope: Scope = "context",
        trajectory: Trajectory | None = None,
        on_leak: OnLeak = "warn",
        filter: TextFilter | None = None,
    ) -> None:
        check_choice("scope", scope)
        check_choice("on_leak", on_leak)
        self._trajectory = trajectory if trajectory is not None else Trajectory()
        self._scope: Scope = scope
        self._capture = ActiveCapture(
            trajectory=self._trajectory,
            exclude=as_predicate(exclude, "exclude"),
            watches=as_predicate(select, "select"),
            on_leak=on_leak,
        )
        self._filter = filter
        self._watcher = Watcher(self._capture)
        self._stack = ExitStack()
        self._used = False

    @property
    def calls(self) -> list[CallTrace]:
        """The calls of an ended block for trace sinks, with the tokens that the provider reported, else 0."""
        return self._watcher.traces()

    def __enter__(self) -> Trajectory:
        install()
        if self._used:
            raise ConfigError("this observation was used before: make one for each block, `with observe(): ...`")
        self._used = True
        capture = self._capture.heard_by(self._watcher, active())
        self._stack.enter_context(activated(capture, self._scope))
        return self._trajectory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._watcher.close(self._trajectory)
        self._mask()
        if isinstance(error, Exception) and current_trajectory() is not self._trajectory:
            self._trajectory.exception = as_rollout_exception(error)
        self._trajectory.finish()
        if self._capture.faults and error is not self._capture.faults[0]:
            raise self._capture.faults[0] from error

    def _mask(self) -> None:
        """Filter the conversations of the trajectory, and count the texts that changed."""
        masking = Masking(self._filter)
        for history in (self._trajectory, *self._trajectory.additional_histories):
            masking.filter_in_place(history)
        if masking.count:
            self._trajectory.metrics["masked_texts"] = masking.count

    async def __aenter__(self) -> Trajectory:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class Watcher(RunTree):
    """Callback handler that records the start and the end of every observed chat model call."""

    def __init__(self, capture: ActiveCapture) -> None:
        super().__init__()
        self._capture = capture
        self._started: dict[UUID, StartedCall] = {}
        self._calls: list[Call] = []
        self._tokens: dict[str, tuple[int, int]] = {}

    def on_chat_model_start(
        self, serialized: Any, messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        super().on_chat_model_start(serialized, messages, run_id=run_id, **kwargs)
        models = chat_models_on_stack()
        if self.site_of(run_id).judge is not None:
            return  # the judge is no part of the app
        if len(models) > 1:
            return  # a chat model that delegates to another: the outer call has its own event
        original = models[0] if models else None
        agent = self.agent_of(run_id)
        origin = origin_of(original, kwargs.get("metadata") or {}, {}, kwargs.get("tags"), agent)
        if original is not None and not self._selects(origin, original):
            return
        self._started[run_id] = started_call(messages[0], kwargs, origin)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        started = self._started.pop(run_id, None)
        if started is not None:
            messages = answers(response)
            outputs = tuple(output_of(index, message) for index, message in enumerate(messages))
            call = self._keep(started, outputs, outputs[0].status if outputs else CallStatus.FAILED, None)
            used = tokens_of(messages)
            self._tokens[call.id] = (0, 0) if used is None else (used.prompt, used.completion)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        started = self._started.pop(run_id, None)
        if started is not None:
            cancelled = not isinstance(error, Exception)
            self._keep(started, (), CallStatus.CANCELLED if cancelled else CallStatus.FAILED, error_text(error))

    def close(self, trajectory: Trajectory) -> None:
        """Write the recorded calls on the trajectory. Calls without a response are added to its log."""
        for started in self._started.values():
            self._keep(started, (), CallStatus.CANCELLED, "it had not ended when the observation did")
        self._started.clear()
        show(trajectory, self._calls, marked=False)
        sent = (message for call in self._calls for message in call.messages if message.get("role") == "tool")
        self.tools.write(trajectory, {str(message.get("tool_call_id")) for message in sent})
        for call in self._calls:
            if call.error is not None:
                trajectory.log(f"a call of {call.model} has no answer ({call.status}): {call.error}")
        trajectory.metrics["calls"] = len(self._calls)
        trajectory.metadata["calls"] = [
            call.origin.model_dump(exclude_defaults=True) for call in self._calls if call.origin is not None
        ]

    def traces(self) -> list[CallTrace]:
        """The calls for trace sinks, in order of their start."""
        return [trace_of(call, call.model, *self._tokens.get(call.id, (0, 0))) for call in self._calls]

    def _selects(self, origin: CallOrigin, original: BaseChatModel) -> bool:
        if self._capture.exclude is not None and self._capture.exclude(origin, original):
            return False
        return self._capture.observes(origin, original)

    def _keep(
        self, started: StartedCall, outputs: tuple[CallOutput, ...], status: CallStatus, error: str | None
    ) -> Call:
        trajectory = self._capture.trajectory
        assert trajectory is not None, "observe sets it"
        call = started.ended(trajectory, outputs, status, error=error)
        self._calls.append(call)
        return call


def chat_models_on_stack() -> list[BaseChatModel]:
    """The distinct chat models whose methods are on the call stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # cheaper than a traceback
    models: list[BaseChatModel] = []
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(owner, BaseChatModel) and all(owner is not model for model in models):
            models.append(owner)
        frame = frame.f_back
    return models
