"""`capture` and `observe`: context managers that record the chat model calls of a block under one trajectory, and redirect them or not."""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType
from typing import Any, TypeAlias, cast
from uuid import UUID

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.tools import BaseTool
from langgraph.errors import GraphBubbleUp

from offbook import OffbookError, TrainableModel, Trajectory, current_trajectory
from offbook.base.errors import CaptureError, ConfigError
from offbook.base.redaction import error_text
from offbook.base.types import Call, CallOrigin, CallOutput, CallStatus, CallTrace, as_rollout_exception
from offbook.client.model import EndpointModel
from offbook.client.rollouts.capture import MAX_COMPLETION_TOKENS, capturing, completion_limit, logged_reward, trace_of
from offbook.supervised.masking import Masking, TextFilter
from offbook_langgraph.chat_model import Answering, chat_model, in_own_loop

from .active_capture import ActiveCapture, CallRoute, OnLeak, Scope, SharedState, activated, active
from .langchain_patches import install
from .origins import OriginCounts, Predicate, Selection, as_predicate, origin_of, warn_unlike
from .recorded_calls import RecordedCalls, StartedCall, TrainOn, answers, output_of, show, started_call, tokens_of
from .run_tree import RunTree

Models: TypeAlias = TrainableModel | Mapping[TrainableModel, Selection]
"""The trained model; or several, each with a selection of calls: one LoRA per role."""

Answerers: TypeAlias = Answering | Mapping[Answering, Selection]
"""The models that answer in a comparison in place of the trained ones, with the same selections."""

CAPTURED = "captured_calls"
"""Name of a trajectory's metric: the number of calls that the trained models answered."""
# Allowed values of the options with a closed set.
OPTIONS = {"scope": ("context", "process"), "on_leak": ("error", "warn", "ignore"), "shared_state": ("error", "allow")}


def by_model(models: Models, select: Selection | None) -> dict[TrainableModel, Predicate | None]:
    """Each trained model with the predicate that selects its calls. Raises ConfigError."""
    if isinstance(models, TrainableModel):
        return {models: as_predicate(select, "select")}
    if not isinstance(models, Mapping) or not models:  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
        raise ConfigError(
            f"model: a TrainableModel, or a mapping of several to what each takes, is needed, got {type(models).__name__} "
            f"{models!r:.80}"
        )
    if select is not None:
        raise ConfigError(
            "select: with several models, each has its own selection: model={planner: {'node': 'plan'}, ...}"
        )
    for key in models:
        if not isinstance(key, TrainableModel):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"model: the keys must be TrainableModels, got {key!r}")
    return {key: as_predicate(taken, f"model[{key.name!r}]") for key, taken in models.items()}


def by_answerer(models: Models | Answerers, select: Selection | None) -> Mapping[Answering, Predicate | None]:
    """Like `by_model`, also for the other LLMs of a comparison."""
    if isinstance(models, EndpointModel):
        return {models: as_predicate(select, "select")}
    if isinstance(models, Mapping) and models and all(isinstance(key, EndpointModel) for key in models):
        return {key: as_predicate(taken, f"model[{key.name!r}]") for key, taken in models.items()}
    return {**by_model(cast(Models, models), select)}


def check_choice(option: str, value: str) -> None:
    """Raise ConfigError unless `value` is one of the option's values."""
    if value not in OPTIONS[option]:
        raise ConfigError(f"{option}: one of {', '.join(OPTIONS[option])} is needed, got {value!r}")


def check_length(max_completion_tokens: int | None) -> None:
    """Raise ConfigError unless the limit is None or a whole number of at least 1."""
    if max_completion_tokens is None:
        return
    if not isinstance(max_completion_tokens, int) or max_completion_tokens < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"max_completion_tokens: a whole number of at least 1 is needed, got {max_completion_tokens!r}"
        )


class Block(ABC):
    """A block that records calls under a trajectory, once."""

    def __init__(self, scope: Scope, trajectory: Trajectory | None) -> None:
        check_choice("scope", scope)
        self._scope: Scope = scope
        self._trajectory = trajectory if trajectory is not None else Trajectory()
        self._faults: list[CaptureError] = []
        self._stack = ExitStack()
        self._used = False

    def _begin(self) -> None:
        install()
        if self._used:
            raise ConfigError(f"this {type(self).__name__} was used before: make one for each rollout or block")
        self._used = True

    @abstractmethod
    def _end(self, error: BaseException | None) -> None: ...

    def __exit__(self, *raised: Any) -> None:
        """Write what was recorded on the trajectory. Raises a capture error that the app swallowed."""
        error: BaseException | None = raised[1]
        self._stack.close()
        self._end(error)
        if self._faults and error is not self._faults[0]:
            raise self._faults[0] from error

    async def __aexit__(self, *raised: Any) -> None:
        self.__exit__(*raised)


class capture(Block):  # used like a function: `async with capture(model) as trajectory`
    """Send the selected chat model calls of a block to `model` and record them under one trajectory.

    `with` and `async with` return the trajectory; it has the conversations when the block ends. Use one capture per rollout.
    Captures nest: a call goes to the innermost one that selects it.

    select, exclude: which calls (see `Selection`); the others stay on the app's own model.
    scope: "process" also captures threads and event loops that ran before the block. One such capture per process.
    on_leak: what happens when a request to another LLM bypasses the capture; "error" raises LeakError.
    shared_state: whether two rollouts may use one checkpointer thread or store namespace; "error" raises SharedStateError.
    max_completion_tokens: limit per call, unless the app sets a smaller one; None: the Trainer's limit, else 1,024.
    train_on: origin -> the weight of a call in training, or False. `origin.unused` is set when the app discarded the output.

    Raises ConfigError for an invalid option or a second use, CaptureError for a call that it cannot assign.
    """

    def __init__(
        self,
        model: Models | Answerers,
        *,
        select: Selection | None = None,
        exclude: Selection | None = None,
        scope: Scope = "context",
        trajectory: Trajectory | None = None,
        temperature: float | None = 1.0,
        max_completion_tokens: int | None = None,
        on_leak: OnLeak = "error",
        shared_state: SharedState = "error",
        train_on: TrainOn | None = None,
    ) -> None:
        super().__init__(scope, trajectory)
        check_choice("on_leak", on_leak)
        check_choice("shared_state", shared_state)
        check_length(max_completion_tokens)
        self._models = by_answerer(model, select)
        self._temperature = temperature
        self._longest = max_completion_tokens
        self._train_on = train_on
        self._recorded = RecordedCalls()
        self._faults = self._recorded.faults
        self._capture = ActiveCapture(
            trajectory=self._trajectory,
            runs=self._recorded,
            faults=self._faults,
            exclude=as_predicate(exclude, "exclude"),
            on_leak=on_leak,
            shared_state=shared_state,
        )

    @property
    def counts(self) -> OriginCounts:
        """The origins of its calls."""
        return self._capture.counts

    def _limit(self) -> int:
        """Most tokens of a call, unless the app sets fewer."""
        return self._longest or completion_limit() or MAX_COMPLETION_TOKENS

    async def _routes(self) -> tuple[CallRoute, ...]:
        longest = self._limit()
        targets = await asyncio.gather(
            *(chat_model(model, self._temperature, longest=longest) for model in self._models)
        )
        return tuple(CallRoute(target, select) for target, select in zip(targets, self._models.values(), strict=True))

    async def __aenter__(self) -> Trajectory:
        return self._enter(await self._routes())

    def __enter__(self) -> Trajectory:
        return self._enter(in_own_loop(self._routes()))

    def _enter(self, routes: tuple[CallRoute, ...]) -> Trajectory:
        self._begin()
        capture = replace(self._capture, routes=routes, outer=active())
        self._stack.enter_context(capturing(self._trajectory, process=self._scope == "process"))
        self._stack.enter_context(activated(capture, self._scope))
        return self._trajectory

    def _end(self, error: BaseException | None) -> None:
        add_tool_note(error)
        warn_unlike(self._capture.calls)
        self._recorded.add_length_note(error, self._limit())
        self._trajectory.metrics[CAPTURED] = self._trajectory.metrics.get(CAPTURED, 0) + self._recorded.count
        self._recorded.close(self._trajectory, self._train_on)
        try:
            self._recorded.show(self._trajectory)
        except (ValueError, TypeError, KeyError) as unreadable:  # an unusual message must not fail the rollout
            self._trajectory.log(f"the conversations cannot be shown: {unreadable!r}")
        if self._trajectory.reward is None:
            self._trajectory.reward = logged_reward(self._trajectory)


class observe(Block):  # used like a function: `with observe() as trajectory`
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
        super().__init__(scope, trajectory)
        check_choice("on_leak", on_leak)
        self._capture = ActiveCapture(
            trajectory=self._trajectory,
            exclude=as_predicate(exclude, "exclude"),
            watches=as_predicate(select, "select"),
            on_leak=on_leak,
            faults=self._faults,
        )
        self._filter = filter
        self._watcher = Watcher(self._capture)

    @property
    def calls(self) -> list[CallTrace]:
        """The calls of an ended block for trace sinks, with the tokens that the provider reported, else 0."""
        return self._watcher.traces()

    def __enter__(self) -> Trajectory:
        self._begin()
        capture = replace(self._capture, runs=self._watcher, outer=active())
        self._stack.enter_context(activated(capture, self._scope))
        return self._trajectory

    async def __aenter__(self) -> Trajectory:
        return self.__enter__()

    def _end(self, error: BaseException | None) -> None:
        self._watcher.close(self._trajectory)
        masking = Masking(self._filter)
        for history in (self._trajectory, *self._trajectory.additional_histories):
            masking.filter_in_place(history)
        if masking.count:
            self._trajectory.metrics["masked_texts"] = masking.count
        if isinstance(error, Exception) and current_trajectory() is not self._trajectory:
            self._trajectory.exception = as_rollout_exception(error)
        self._trajectory.finish()


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
            self._tokens[call.id] = tokens_of(messages)

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


def add_tool_note(error: BaseException | None) -> None:
    """Add a note to an exception that a LangChain tool raised: the tool, its arguments, and how to turn it into a low reward.

    Does nothing for other exceptions and for this package's own errors.
    """
    if not isinstance(error, Exception) or isinstance(error, OffbookError | GraphBubbleUp):
        return
    inside = [frame.f_locals for frame in _frames(error) if frame.f_globals.get("__name__") == BaseTool.__module__]
    runs = [values for values in inside if "tool_input" in values and isinstance(values.get("self"), BaseTool)]
    if not runs or any("the policy's arguments" in note for note in getattr(error, "__notes__", ())):
        return
    tool, arguments = cast(BaseTool, runs[-1]["self"]), _policys_arguments(runs[-1])
    error.add_note(
        f"The tool {tool.name!r} raised on the policy's arguments {arguments!r:.300}. "
        "This rollout is unscored, so the policy does not learn from it. If the arguments are to blame, show the model the "
        "error: create_agent(..., middleware=[ToolErrorMiddleware(lambda error, request: repr(error))]) or ToolNode(tools, "
        "handle_tool_errors=True). Or give a low reward: wrap a function that runs the graph in `try:` and ends with "
        f"`except {type(error).__name__}: return 0.0`"
    )


def _policys_arguments(run: Mapping[str, object]) -> object:
    """The arguments of a tool's run that the model wrote, without state, store and runtime that LangGraph injected."""
    given = run["tool_input"]
    if not isinstance(given, dict):
        return given
    return run.get("filtered_tool_input", sorted(cast(dict[str, object], given)))


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
