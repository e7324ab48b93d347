"""The agents that rollouts run: a function of one scenario, a graph, or a factory that builds a graph per rollout."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast, get_type_hints

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.base import RunnableBindingBase
from langgraph.graph.state import CompiledStateGraph  # pyright: ignore[reportMissingTypeStubs]
from langgraph.pregel import Pregel  # pyright: ignore[reportMissingTypeStubs]
from langgraph.types import Command, Interrupt

from offbook.base.errors import RolloutError
from offbook.scenarios.identity import scenario_fields, scenario_text
from offbook_langgraph.calls.error_notes import add_context_note

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
        if context is not None:
            return await self.graph.ainvoke(graph_input, config, context=context)
        try:
            return await self.graph.ainvoke(graph_input, config)
        except (AttributeError, TypeError) as error:
            add_context_note(error, getattr(unbound(self.graph), "context_schema", None))
            raise

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


async def in_own_thread(work: Callable[[], Any]) -> Any:
    """Run blocking work in a new thread with a copy of this context. A cancelled caller does not stop the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except StopIteration as raised:  # a future rejects StopIteration
            error = RuntimeError(f"the function raised {raised!r}")
            error.__cause__ = raised
        except BaseException as raised:  # noqa: BLE001  # passed on to the awaiting task
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended, so nothing waits for the result
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="offbook-rollout", daemon=True).start()
    return await done
