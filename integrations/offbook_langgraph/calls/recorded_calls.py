"""A rollout's calls from LangChain's events: conversations of them, and those whose output the app discarded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from uuid import UUID

from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import LLMResult
from langgraph.errors import GraphRecursionError, ParentCommand

from offbook import History, Trajectory
from offbook.base import clock
from offbook.base.errors import CaptureError, ConfigError
from offbook.base.types import CUT, Call, CallOrigin, CallOutput, CallStatus, Message, Sampling, Tool, new_id
from offbook.client.rollouts.capture import continues, histories_of, replayed
from offbook_langgraph.chat_model import MARK

from .provider_formats import openai_tools
from .run_tree import RunTree, tool_call_ids

FINISHED = {"length": CallStatus.TRUNCATED, "max_tokens": CallStatus.TRUNCATED, "MAX_TOKENS": CallStatus.TRUNCATED}
"""Finish reasons of providers for a truncated answer."""


@dataclass(frozen=True)
class StartedCall:
    """A chat model call that has started. `origin` is None where it is not known."""

    messages: Sequence[BaseMessage]
    tools: tuple[Tool, ...] | None
    origin: CallOrigin | None = None
    started_at: float = field(default_factory=clock.now)

    def ended(
        self,
        trajectory: Trajectory,
        outputs: tuple[CallOutput, ...],
        status: CallStatus,
        *,
        error: str | None = None,
        call_id: str | None = None,
        step: int = 0,
    ) -> Call:
        """Build the finished call. `call_id` and `step` come from the server that recorded it."""
        return Call(
            id=call_id or new_id("call"),
            trajectory_id=trajectory.id,
            model=(self.origin.model if self.origin is not None else None) or "unknown",
            step=step,
            status=status,
            sampling=Sampling(),
            messages=plain(self.messages),
            tools=self.tools,
            prompt_ids=(),
            outputs=outputs,
            origin=self.origin,
            error=error,
            started_at=self.started_at,
            ended_at=clock.end_of(self.started_at),
        )


def started_call(
    messages: Sequence[BaseMessage], event: Mapping[str, Any], origin: CallOrigin | None = None
) -> StartedCall:
    """Build a StartedCall from LangChain's start event."""
    params: dict[str, Any] = event.get("invocation_params") or {}
    tools: list[Tool] = openai_tools(params.get("tools") or [])
    return StartedCall(messages, tuple(tools) or None, origin)


def answers(response: LLMResult) -> list[BaseMessage]:
    """The messages of a response, one per choice."""
    messages = (getattr(generation, "message", None) for generation in (response.generations or [[]])[0])
    return [message for message in messages if isinstance(message, BaseMessage)]


def show(trajectory: Trajectory, calls: list[Call], *, marked: bool) -> None:
    """Write the conversations of these calls on the trajectory.

    `marked` means that an Offbook server recorded the calls under their ids. Messages that the trajectory already has
    (a graph's state) stay. They get the tools and the system messages of the conversation that they continue, and all other
    conversations become additional histories.
    """
    histories = histories_of([call for call in calls if call.outputs], marked=marked)
    if not trajectory.messages_and_choices and histories:
        own, *others = histories
        trajectory.messages_and_choices, trajectory.tools = own.messages_and_choices, own.tools
        trajectory.additional_histories = others
        return
    own = next((history for history in histories if continues(trajectory, _after_system_messages(history))), None)
    if own is not None:
        known = len(own.messages_and_choices) - len(_after_system_messages(own).messages_and_choices)
        trajectory.messages_and_choices[:0] = own.messages_and_choices[:known]
        trajectory.tools = own.tools
    trajectory.additional_histories = [history for history in histories if history is not own]


def _after_system_messages(history: History) -> History:
    roles = [message["role"] for message in history.messages()]
    first = next((index for index, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    return History(messages_and_choices=history.messages_and_choices[first:])


def plain(messages: Sequence[BaseMessage]) -> tuple[Message, ...]:
    """Convert LangChain messages of any provider to OpenAI's format."""
    return tuple(convert_to_openai_messages(list(messages)))


def output_of(index: int, message: BaseMessage) -> CallOutput:
    """Convert one choice of a response."""
    facts: Mapping[str, Any] = message.response_metadata
    reason = facts.get("finish_reason") or facts.get("stop_reason")
    shaped = dict(plain([message])[0]) if isinstance(message, AIMessage) else {"content": str(message.content)}
    if isinstance(shaped.get("content"), list):  # blocks that are not all text
        shaped["content"] = str(message.text)
    calls = bool(shaped.get("tool_calls"))
    return CallOutput(
        index=index,
        token_ids=(),
        logprobs=(),
        message=cast(Message, {name: value for name, value in shaped.items() if name != "role"}),
        finish_reason="length" if reason in FINISHED else "tool_calls" if calls else "stop",
        status=FINISHED.get(str(reason), CallStatus.COMPLETE),
    )


def tokens_of(messages: Sequence[BaseMessage]) -> tuple[int, int]:
    """Tokens of prompt and completion as the provider reported them with the first choice; 0 if it did not."""
    usage = next((message.usage_metadata for message in messages if isinstance(message, AIMessage)), None)
    return (0, 0) if usage is None else (usage["input_tokens"], usage["output_tokens"])


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

    def add_length_note(self, error: BaseException | None, longest: int) -> None:
        """Add a note to an exception if calls were truncated: an app that reads the answer fails in ways of its own.

        `longest`: the limit of a call in tokens."""
        outputs = [output_of(0, messages[0]) for _, messages in list(self._answered)]
        cut = sum(output.status is CallStatus.TRUNCATED for output in outputs)
        if not cut or not isinstance(error, Exception) or any(CUT in note for note in getattr(error, "__notes__", ())):
            return
        error.add_note(f"{CUT}{cut} of {len(outputs)} model calls, at most {longest} tokens each")

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
