"""Tracks a rollout's recorded calls, and uses LangChain's run tree to find those whose output the app discarded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from uuid import UUID

from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langgraph.errors import GraphRecursionError, ParentCommand

from offbook import Trajectory
from offbook.base.errors import CaptureError, ConfigError
from offbook.base.types import (
    CUT,
    Call,
    CallOrigin,
    CallStatus,
)
from offbook.client.rollouts.capture import replayed
from offbook.client.rollouts.sampling import BUNDLED
from offbook_langgraph.chat_model import MARK

from .conversations import (
    StartedCall,
    answers,
    output_of,
    show,
    started_call,
)
from .run_tree import RunTree, tool_call_ids

TrainOn = Callable[[CallOrigin], bool | float]
"""Origin -> the weight of a call's tokens in training; True is 1, False is 0. `origin.unused` is set."""

OUTPUT_KEPT = (ParentCommand, GraphRecursionError)
"""Exceptions that do not discard a call's output: a hand-off to the parent graph, and the limit of steps."""


class RecordedCalls(RunTree):
    """The recorded calls of one rollout, with their origins.

    A call inside a run that ended with an error (a node that was retried or interrupted, a chain under `with_retry`) is
    unused: the app discarded its output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[CaptureError] = []
        self._origins: dict[str, CallOrigin] = {}
        self._choices: set[tuple[str, int]] = set()
        self._run_of: dict[str, UUID] = {}
        self._failed: set[UUID] = set()
        self._started: dict[UUID, StartedCall] = {}
        self._answered: list[tuple[StartedCall, list[BaseMessage]]] = []

    def note(self, call_id: str, index: int, origin: CallOrigin) -> None:
        """Note that a call was answered and recorded under this id. Raises CaptureError for a choice that came before."""
        if (call_id, index) in self._choices:
            raise replayed(f"the answer of call {call_id} came a second time")
        self._choices.add((call_id, index))
        self._origins[call_id] = origin

    @property
    def count(self) -> int:
        """The number of calls that were answered and recorded."""
        return len(self._origins)

    def close(self, trajectory: Trajectory, train_on: TrainOn | None) -> None:
        """Write unused calls, weights and tool runs on the trajectory.

        Raises ConfigError when `train_on` returns something other than a number of at least 0.
        """
        self.tools.write(trajectory, tool_call_ids(started.messages for started, _ in list(self._answered)))
        origins = dict(self._origins)  # a copy: a task that outlives the rollout may still add calls
        unused = frozenset(call_id for call_id in origins if self._is_unused(call_id))
        trajectory.unused = [*trajectory.unused, *(call_id for call_id in origins if call_id in unused)]
        if train_on is None:
            return
        for call_id, origin in origins.items():
            weight = train_on(origin.model_copy(update={"unused": True}) if call_id in unused else origin)
            if not isinstance(weight, bool | int | float) or not 0 <= weight < float("inf"):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"train_on: a bool or a number of at least 0 is needed, got {weight!r} for {origin!r}"
                )
            if weight != 1:
                trajectory.weights[call_id] = float(weight)

    def show(self, trajectory: Trajectory) -> None:
        """Write the conversations of the recorded calls on the trajectory."""
        calls: list[Call] = []
        for started, messages in list(self._answered):
            mark: Mapping[str, Any] = messages[0].response_metadata[MARK]
            if mark["trajectory_id"] == trajectory.id:
                outputs = tuple(output_of(index, message) for index, message in enumerate(messages))
                recorded = {"call_id": mark["call_id"], "step": mark["step"]}
                calls.append(started.ended(trajectory, outputs, outputs[0].status, **recorded))
        show(trajectory, calls, marked=True)

    def add_length_note(self, error: BaseException | None, longest: int, bases: Iterable[str]) -> None:
        """Add a note to an exception if calls were truncated: an app that reads the answer fails in ways of its own.

        `longest`: the limit of a call in tokens. `bases`: the base models, since the bundled ones write little."""
        outputs = [output_of(0, messages[0]) for _, messages in list(self._answered)]
        cut = sum(output.status is CallStatus.TRUNCATED for output in outputs)
        if not cut or not isinstance(error, Exception) or any(CUT in note for note in getattr(error, "__notes__", ())):
            return
        limits = "".join(
            f". {BUNDLED[base]}, no other JSON: use another base for structured output"
            for base in bases
            if base in BUNDLED
        )
        error.add_note(f"{CUT}{cut} of {len(outputs)} model calls, at most {longest} tokens each{limits}")

    def _is_unused(self, call_id: str) -> bool:
        run = self._run_of.get(call_id)
        while run is not None:
            if run in self._failed:
                return True
            run = self._parents.get(run)
        return False

    def on_chain_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        if not isinstance(error, OUTPUT_KEPT):
            self._failed.add(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        super().on_tool_error(error, run_id=run_id, **kwargs)
        if not isinstance(error, OUTPUT_KEPT):
            self._failed.add(run_id)

    def on_chat_model_start(
        self, serialized: Any, messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        super().on_chat_model_start(serialized, messages, run_id=run_id, **kwargs)
        self._started[run_id] = started_call(messages[0], kwargs)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        self._started.pop(run_id, None)
        if isinstance(error, CaptureError) and error not in self.faults:
            self.faults.append(error)

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        started, messages = self._started.pop(run_id, None), answers(response)
        marks = [mark for message in messages if (mark := message.response_metadata.get(MARK))]
        if any(mark["call_id"] in self._run_of for mark in marks):
            return  # a chat model that hands its calls to another one: the other's run has ended first
        for mark in marks:
            self._run_of[mark["call_id"]] = run_id
        if started is not None and len(marks) == len(messages) > 0:
            self._answered.append((started, messages))
