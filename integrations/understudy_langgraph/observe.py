"""`observe`: a block of code whose chat model calls are recorded as they are, on the app's own models."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any
from uuid import UUID

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from understudy import Trajectory, current_trajectory
from understudy.integration import Call, CallOrigin, CallOutput, CallStatus, ConfigError, as_rollout_exception

from .active_capture import ActiveCapture, OnLeak, Scope, activated, active
from .capture_block import check_choice
from .conversations import BegunCall, answers, begun_call, output_of, show
from .origins import origin_of
from .patches import install
from .runs import RunTree
from .selection import Selection, as_predicate


class observe:  # used like a function: `with observe() as trajectory`
    """Inside, the app's chat models answer as ever, whatever their provider, and what they were asked and answered is in
    the trajectory that the block is given when it ends: conversations of plain messages and choices, for traces,
    scenarios and supervised warm starts. No server is needed. Works with `with` and `async with`.

    select, exclude: which calls. A call that is made by another chat model on its behalf counts once.
    """

    def __init__(
        self,
        *,
        select: Selection | None = None,
        exclude: Selection | None = None,
        scope: Scope = "context",
        trajectory: Trajectory | None = None,
        on_leak: OnLeak = "warn",
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
        self._stack = ExitStack()
        self._used = False

    def __enter__(self) -> Trajectory:
        install()
        if self._used:
            raise ConfigError("this observation was used before: make one for each block, `with observe(): ...`")
        self._used = True
        self._watcher = Watcher(self._capture)
        capture = self._capture.heard_by(self._watcher, active())
        self._stack.enter_context(activated(capture, self._scope))
        return self._trajectory

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._watcher.close(self._trajectory)
        if isinstance(error, Exception) and current_trajectory() is not self._trajectory:
            self._trajectory.exception = as_rollout_exception(error)
        self._trajectory.finish()
        if self._capture.faults and error is not self._capture.faults[0]:
            raise self._capture.faults[0] from error

    async def __aenter__(self) -> Trajectory:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


class Watcher(RunTree):
    """Hears the begin and the end of every chat model call."""

    def __init__(self, capture: ActiveCapture) -> None:
        super().__init__()
        self._capture = capture
        self._asked: dict[UUID, BegunCall] = {}
        self._calls: list[Call] = []

    def on_chat_model_start(
        self, serialized: Any, messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        super().on_chat_model_start(serialized, messages, run_id=run_id, **kwargs)
        models = chat_models_on_stack()
        if len(models) > 1:
            return  # made on behalf of another call, which is heard by itself
        original = models[0] if models else None
        agent = self.agent_of(run_id)
        origin = origin_of(original, kwargs.get("metadata") or {}, {}, kwargs.get("tags"), agent)
        if original is not None and not self._means(origin, original):
            return
        self._asked[run_id] = begun_call(messages[0], kwargs, origin)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        asked = self._asked.pop(run_id, None)
        if asked is not None:
            outputs = tuple(output_of(at, message) for at, message in enumerate(answers(response)))
            self._keep(asked, outputs, outputs[0].status if outputs else CallStatus.FAILED, None)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        asked = self._asked.pop(run_id, None)
        if asked is not None:
            cancelled = not isinstance(error, Exception)
            self._keep(asked, (), CallStatus.CANCELLED if cancelled else CallStatus.FAILED, repr(error))

    def close(self, trajectory: Trajectory) -> None:
        """Write what was heard on the trajectory. Calls without an answer are in its log."""
        for asked in self._asked.values():
            self._keep(asked, (), CallStatus.CANCELLED, "it had not ended when the observation did")
        self._asked.clear()
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

    def _means(self, origin: CallOrigin, original: BaseChatModel) -> bool:
        if self._capture.exclude is not None and self._capture.exclude(origin, original):
            return False
        return self._capture.observes(origin, original)

    def _keep(self, asked: BegunCall, outputs: tuple[CallOutput, ...], status: CallStatus, error: str | None) -> None:
        trajectory = self._capture.trajectory
        assert trajectory is not None, "observe gives one"
        self._calls.append(asked.ended(trajectory, outputs, status, error=error))


def chat_models_on_stack() -> list[BaseChatModel]:
    """The different chat models whose methods are running here, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # a traceback would cost more
    found: list[BaseChatModel] = []
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(owner, BaseChatModel) and all(owner is not each for each in found):
            found.append(owner)
        frame = frame.f_back
    return found
