"""Runs one rollout inside a capture: of a function of one scenario, a graph, or a factory that builds a graph per rollout."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, cast, get_type_hints

from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langgraph.graph.state import CompiledStateGraph  # pyright: ignore[reportMissingTypeStubs]
from langgraph.pregel import Pregel  # pyright: ignore[reportMissingTypeStubs]
from langgraph.types import Command, Interrupt

from offbook import RewardResult, Trajectory
from offbook.base.errors import CaptureError, ConfigError, RolloutError
from offbook.base.options import RunOptions, option
from offbook.base.sync_calls import in_own_thread
from offbook.base.types import Message, as_rollout_exception
from offbook.client.rollouts.capture import capturing, logged_reward
from offbook.contracts import Judge
from offbook.rewards.reward_result import as_reward
from offbook.scenarios.identity import scenario_fields, scenario_id, scenario_text
from offbook_langgraph.calls.active_capture import OnLeak, Scope, SharedState
from offbook_langgraph.calls.capture_block import Answerers, Models, capture, observe
from offbook_langgraph.calls.origins import OriginCounts, Selection
from offbook_langgraph.calls.recorded_calls import TrainOn

ToInput = Callable[[Any], Any]
OnInterrupt = Callable[[Any], object]
"""The value of the graph's interrupt -> the value for `Command(resume=...)`; sync or async."""

ToContext = Callable[[Any], Any]
"""scenario -> the run-scoped context of a graph with a `context_schema`. A value that is not callable is the context."""

INTERRUPTED = "__interrupt__"
"""Key in a graph's output that holds its pending interrupts."""


class Agent(Protocol):
    """Something that runs once on a scenario. `returns_output` means that its return value is never the reward."""

    @property
    def returns_output(self) -> bool: ...

    async def run(self, scenario: Any, thread_id: str) -> object: ...


@dataclass(frozen=True)
class GraphAgent:
    """A compiled graph or any other Runnable. Each rollout uses a new `thread_id` for checkpointers."""

    graph: Runnable[Any, Any]
    to_input: ToInput | None = None
    on_interrupt: OnInterrupt | None = None
    context: ToContext | object = None

    @property
    def returns_output(self) -> bool:
        """True unless the graph is an `@entrypoint` function, which may return the reward."""
        return not is_entrypoint(self.graph)

    async def run(self, scenario: Any, thread_id: str) -> object:
        """Invoke the graph, answer its interrupts, and return its output. Raises RolloutError for an unanswered interrupt."""
        graph_input = self.to_input(scenario) if self.to_input else default_input(self.graph, scenario)
        context = self.context(scenario) if callable(self.context) else self.context
        output = await self._invoke(graph_input, thread_id, context)
        while waiting := interrupts(output):
            output = await self._invoke(Command(resume=await self._answers(waiting)), thread_id, context)
        return output

    async def _invoke(self, graph_input: Any, thread_id: str, context: object) -> object:
        config: RunnableConfig = {"configurable": {"thread_id": thread_id}}
        passed = {} if context is None else {"context": context}
        return await self.graph.ainvoke(graph_input, config, **passed)

    async def _answers(self, waiting: Sequence[Interrupt]) -> dict[str, object]:
        if self.on_interrupt is None:
            raise RolloutError(
                f"the graph was interrupted with {waiting[0].value!r:.500} and nobody answers: pass "
                "on_interrupt=(value) -> resume"
            )
        answers: dict[str, object] = {}
        for interrupt in waiting:
            answer = self.on_interrupt(interrupt.value)
            answers[interrupt.id] = await answer if inspect.isawaitable(answer) else answer
        return answers


@dataclass(frozen=True)
class FunctionAgent:
    """A user's function of one scenario, async or sync. A sync function runs in its own thread.

    A graph that the function returns, directly or from a context manager, is run on the scenario.
    """

    function: Callable[..., Any]
    to_input: ToInput | None = None
    on_interrupt: OnInterrupt | None = None
    context: ToContext | object = None

    @property
    def returns_output(self) -> bool:
        """True for a factory: the graph that it builds returns a state."""
        return is_factory(self.function)

    async def run(self, scenario: Any, thread_id: str) -> object:
        """Call the function, run the graph that it may return, and return the output. Raises RolloutError for an interrupt."""
        call = functools.partial(self.function, *self._arguments(scenario, thread_id))
        if is_async(self.function):
            outcome = await call()
        else:
            outcome = await in_own_thread(call)
            outcome = await outcome if inspect.isawaitable(outcome) else outcome
        if isinstance(outcome, AbstractAsyncContextManager):
            async with cast(AbstractAsyncContextManager[object], outcome) as value:
                return await self._output(value, scenario, thread_id)
        if isinstance(outcome, AbstractContextManager):
            with cast(AbstractContextManager[object], outcome) as value:
                return await self._output(value, scenario, thread_id)
        return await self._output(outcome, scenario, thread_id)

    async def _output(self, outcome: object, scenario: Any, thread_id: str) -> object:
        if isinstance(outcome, Runnable):
            graph = cast(Runnable[Any, Any], outcome)
            return await GraphAgent(graph, self.to_input, self.on_interrupt, self.context).run(scenario, thread_id)
        waiting = interrupts(outcome)
        if waiting:
            raise RolloutError(
                f"the function returned the state of a graph that was interrupted with {waiting[0].value!r:.500}: resume "
                "it in the function, with Command(resume=...), before it returns"
            )
        return outcome

    def _arguments(self, scenario: Any, thread_id: str) -> tuple[Any, ...]:
        if not is_factory(self.function):
            return (scenario,)
        return ({"configurable": {"thread_id": thread_id}},) if positional(self.function) else ()


def default_input(graph: Runnable[Any, Any], scenario: Any) -> Any:
    """The input of a graph without `to_input`.

    A compiled StateGraph gets the scenario's text as the user's message. Any other Runnable gets the scenario itself, as a
    dict of its fields unless it is a string.
    """
    inner = unbound(graph)
    if isinstance(inner, CompiledStateGraph):
        return {"messages": [("user", scenario_text(scenario))]}
    if isinstance(inner, Pregel) or isinstance(scenario, str):
        return scenario
    return scenario_fields(scenario)


def unbound(graph: Runnable[Any, Any]) -> object:
    """The graph inside `with_config` and other bindings."""
    inner: object = graph
    while isinstance(inner, RunnableBindingBase):
        inner = cast(Any, inner).bound
    return inner


def interrupts(output: object) -> Sequence[Interrupt]:
    """The pending interrupts in a graph's output; empty when the graph has ended."""
    if not isinstance(output, Mapping):
        return ()
    waiting = cast(Mapping[str, object], output).get(INTERRUPTED)
    return cast(Sequence[Interrupt], waiting) if waiting else ()


def is_entrypoint(target: object) -> bool:
    """Whether the target is an `@entrypoint` function: a Pregel graph with the function's own input and output."""
    return isinstance(target, Pregel) and not isinstance(target, CompiledStateGraph)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function returns a coroutine. For a callable object, its `__call__` decides."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def is_factory(function: Callable[..., Any]) -> bool:
    """Whether the function takes no scenario: no argument, or only a RunnableConfig, as `langgraph dev` calls factories."""
    parameters = positional(function)
    if not parameters:
        return True
    return len(parameters) == 1 and wants_config(function, parameters[0].name)


def wants_config(function: Callable[..., Any], name: str) -> bool:
    """Whether the parameter `name` is annotated as a RunnableConfig."""
    try:
        hints = get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError, AttributeError):  # annotations with names that exist for type checkers only
        return False
    return hints.get(name) is RunnableConfig


def positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that can be passed by position. A function without a readable signature counts as taking a scenario."""
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [inspect.Parameter("scenario", inspect.Parameter.POSITIONAL_ONLY)]
    return [parameter for parameter in parameters if parameter.kind in kinds]


Reward: TypeAlias = Callable[[Any, Any], object] | Literal["logged"]
"""(scenario, output) -> a number, a dict of numbers with `reward`, or a RewardResult; sync or async. "logged" means that the
reward is the sum of the agent's `offbook.log_reward` calls."""


@dataclass(frozen=True, kw_only=True)
class TrainableOptions(RunOptions):
    """The options of `trainable`."""

    model: Models | None = option(
        None,
        'the TrainableModel; or several, each with a selection of calls: `{planner: {"node": "plan"}, writer: {...}}`',
    )
    reward: Reward | None = option(
        None,
        "(scenario, output) -> a number, a dict with `reward`, or a RewardResult; None: what the function returns. A graph "
        'needs it, or "logged" if the graph calls `offbook.log_reward`, or `judge`',
    )
    judge: Judge | None = option(None, "async function: takes a finished group, returns it with rewards")
    select: Selection | None = option(None, "the app's calls that go to the trained model; None: all; see `Selection`")
    exclude: Selection | None = option(None, "the app's calls that keep its own model")
    to_input: ToInput | None = option(None, "scenario -> the graph's input")
    on_interrupt: OnInterrupt | None = option(None, "value of an interrupt -> the value that resumes the graph")
    context: ToContext | object = option(
        None, "run-scoped context of a graph with a `context_schema`, or scenario -> context"
    )
    temperature: float = option(1.0, "sampling temperature of rollouts")
    max_completion_tokens: int | None = option(
        None, "limit per call, unless the app sets a smaller one; None: 1,024. `train(...)` can override it"
    )
    scope: Scope = option("context", "see `capture`")
    on_leak: OnLeak = option("error", "see `capture`")
    shared_state: SharedState = option("error", "see `capture`")
    train_on: TrainOn | None = option(None, "see `capture`")

    def models(self) -> Models:
        """The trained models. Raises ConfigError when there is none."""
        if self.model is None:
            raise ConfigError(
                "model: no model to train: pass trainable(model=offbook.TrainableModel(...)), train(..., model=...), or on the "
                "command line --model and --base-model"
            )
        return self.model

    def capture(self, trajectory: Trajectory, answerers: Answerers | None = None) -> capture:
        """Create the capture of one rollout. `answerers` replace the trained models in a comparison."""
        several = isinstance(answerers, Mapping)
        return capture(
            self.models() if answerers is None else answerers,
            select=None if several else self.select,
            exclude=self.exclude,
            scope=self.scope,
            trajectory=trajectory,
            temperature=self.temperature,
            on_leak=self.on_leak,
            shared_state=self.shared_state,
            train_on=self.train_on,
        )

    def observe(self, trajectory: Trajectory) -> observe:
        """Create the observation of one rollout on the app's own models: of the calls that training would capture."""
        select = None if isinstance(self.model, Mapping) else self.select
        return observe(select=select, exclude=self.exclude, scope=self.scope, trajectory=trajectory)

    async def rollout(
        self,
        agent: Agent,
        scenario: object,
        judged: bool,
        counts: OriginCounts,
        *,
        trajectory: Trajectory | None = None,
        answerers: Answerers | None = None,
        as_is: bool = False,
    ) -> Trajectory:
        """Run the agent once inside a capture and score the result.

        An exception of the agent or the reward is stored on the trajectory, which stays unscored. A CaptureError is raised.
        `judged` means that a judge scores later. The origins of the calls are added to `counts`. `answerers`: see `capture`.
        `as_is`: the app's own models answer, and the trajectory has their calls as `outside_calls`.
        """
        trajectory = Trajectory() if trajectory is None else trajectory
        trajectory.captured = not as_is
        trajectory.metadata["scenario_id"] = scenario_id(scenario)
        block = self.observe(trajectory) if as_is else self.capture(trajectory, answerers)
        with capturing(trajectory):
            try:
                async with block:
                    output = await agent.run(scenario, trajectory.id)
                    trajectory.messages_and_choices = list(conversation(output))
                # Outside the capture: an LLM judge inside `reward=` must not be redirected.
                trajectory = await self._scored(agent, trajectory, scenario, output, judged)
            except CaptureError:
                raise
            except Exception as error:  # noqa: BLE001  # user code: a failed rollout is data, kept with its traceback
                trajectory.reward = None
                trajectory.exception = as_rollout_exception(error)
            finally:
                if isinstance(block, observe):
                    trajectory.outside_calls, trajectory.captured = block.calls, False
                else:
                    counts.merge(block.counts)
        return trajectory.finish()

    async def _scored(
        self, agent: Agent, trajectory: Trajectory, scenario: object, output: object, judged: bool
    ) -> Trajectory:
        """Set the reward: from `reward=`, else the function's return value, plus the logged rewards. Raises RolloutError."""
        value: object = None
        if callable(self.reward):
            value = self.reward(scenario, output)
            value = await value if inspect.isawaitable(value) else value
        elif self.reward is None and not agent.returns_output and not (judged and not is_reward(output)):
            value = output
        if isinstance(value, Trajectory):
            return own_trajectory(value, trajectory)
        logged = logged_reward(trajectory)
        if value is None and self.reward is not None and callable(self.reward):
            raise RolloutError("reward= returned None; a number, a dict with `reward` or a RewardResult is needed")
        if value is None and logged is None and not judged:
            raise RolloutError(_no_reward(self.reward, output))
        if value is not None:
            result = self._as_reward(value)
            trajectory.reward = result.reward + (logged or 0.0)
            trajectory.metrics.update(result.metrics)
        else:
            trajectory.reward = logged
        return trajectory

    def _as_reward(self, value: object) -> RewardResult:
        try:
            return as_reward(value, "reward=" if self.reward is not None else "the function's return value")
        except RolloutError as error:
            raise RolloutError(
                f"{error}. Return a number (or a dict with `reward`), or pass reward=(scenario, output) -> number"
            ) from error


def is_reward(output: object) -> bool:
    """Whether a function's return value can be a reward. Otherwise it is an output for a judge."""
    if isinstance(output, Mapping):
        return "reward" in output
    return isinstance(output, int | float | RewardResult | Trajectory)


def own_trajectory(value: Trajectory, captured: Trajectory) -> Trajectory:
    """A copy of the trajectory that the function returned, merged with the captured one and its calls."""
    kept: dict[str, object] = {
        "id": captured.id,
        "captured": captured.captured,
        "weights": captured.weights,
        "unused": captured.unused,
    }
    kept["tool_runs"] = captured.tool_runs
    kept["metrics"] = {**captured.metrics, **value.metrics}
    kept["metadata"] = {**captured.metadata, **value.metadata}
    kept["logs"] = [*captured.logs, *value.logs]
    return value.model_copy(update=kept)


def _no_reward(reward: object, output: object) -> str:
    if reward == "logged":
        return 'reward="logged", but the agent did not call offbook.log_reward: call it, or pass reward= or judge='
    return (
        f"the function returned {type(output).__name__} {output!r}, and there is no reward: return a number (or a dict with "
        "`reward`), pass reward=(scenario, output) -> number, judge=, or call offbook.log_reward inside"
    )


def conversation(output: object) -> list[Message]:
    """The messages of a graph's state in OpenAI's format, for display and judges; empty for another output."""
    messages: object = cast(Mapping[str, object], output).get("messages") if isinstance(output, Mapping) else None
    if not isinstance(messages, list) or not all(
        isinstance(message, BaseMessage) for message in cast(list[object], messages)
    ):
        return []
    return convert_to_openai_messages(cast(list[BaseMessage], messages))
