"""What a rollout runs: a function of one scenario, a graph, or a factory that makes either a graph for each rollout."""

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

from understudy.integration import RolloutError, scenario_fields, scenario_text

ToInput = Callable[[Any], Any]
OnInterrupt = Callable[[Any], object]
"""The value that the graph interrupted with -> what it is resumed with; sync or async."""

ToContext = Callable[[Any], Any]
"""scenario -> the graph's run-scoped context, for a graph with a `context_schema`; any other value is the context itself."""

INTERRUPTED = "__interrupt__"
"""Key of the output of a graph that waits for an answer."""


class Agent(Protocol):
    """Runs once on a scenario. `returns_output`: what it returns is never the reward itself."""

    @property
    def returns_output(self) -> bool: ...

    async def run(self, scenario: Any, thread_id: str) -> object: ...


@dataclass(frozen=True)
class GraphAgent:
    """A compiled graph, or any Runnable; each rollout has a thread of its own in checkpointers."""

    graph: Runnable[Any, Any]
    to_input: ToInput | None = None
    on_interrupt: OnInterrupt | None = None
    context: ToContext | object = None

    @property
    def returns_output(self) -> bool:
        return not is_entrypoint(self.graph)

    async def run(self, scenario: Any, thread_id: str) -> object:
        given = self.to_input(scenario) if self.to_input else default_input(self.graph, scenario)
        context = self.context(scenario) if callable(self.context) else self.context
        output = await self._invoke(given, thread_id, context)
        while waiting := interrupts(output):
            output = await self._invoke(Command(resume=await self._answers(waiting)), thread_id, context)
        return output

    async def _invoke(self, given: Any, thread_id: str, context: object) -> object:
        config: RunnableConfig = {"configurable": {"thread_id": thread_id}}
        if context is not None:
            return await self.graph.ainvoke(given, config, context=context)
        try:
            return await self.graph.ainvoke(given, config)
        except (AttributeError, TypeError) as error:
            schema = getattr(unbound(self.graph), "context_schema", None)
            if schema is None or "NoneType" not in str(error):
                raise
            raise RolloutError(
                f"{type(error).__name__}: {error}. The graph has the context_schema {schema.__name__}, and no context was "
                "given: pass context=, a value or (scenario) -> value"
            ) from error

    async def _answers(self, waiting: Sequence[Interrupt]) -> dict[str, object]:
        if self.on_interrupt is None:
            raise RolloutError(
                f"the graph was interrupted with {waiting[0].value!r:.500} and nobody answers: pass "
                "on_interrupt=(value) -> resume"
            )
        answers: dict[str, object] = {}
        for each in waiting:
            answer = self.on_interrupt(each.value)
            answers[each.id] = await answer if inspect.isawaitable(answer) else answer
        return answers


@dataclass(frozen=True)
class FunctionAgent:
    """A user's function of one scenario, async or sync; a sync one runs in a thread of its own. One that returns a graph
    is a factory: the graph is run on the scenario."""

    function: Callable[..., Any]
    to_input: ToInput | None = None
    on_interrupt: OnInterrupt | None = None
    context: ToContext | object = None

    @property
    def returns_output(self) -> bool:
        return is_factory(self.function)

    async def run(self, scenario: Any, thread_id: str) -> object:
        call = functools.partial(self.function, *self._arguments(scenario, thread_id))
        if is_async(self.function):
            outcome = await call()
        else:
            outcome = await in_own_thread(call)
            outcome = await outcome if inspect.isawaitable(outcome) else outcome
        if isinstance(outcome, AbstractAsyncContextManager):
            async with cast(AbstractAsyncContextManager[object], outcome) as made:
                return await self._output(made, scenario, thread_id)
        if isinstance(outcome, AbstractContextManager):
            with cast(AbstractContextManager[object], outcome) as made:
                return await self._output(made, scenario, thread_id)
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
    """A graph's state with the scenario's text as the user's message; what else runs is given the scenario."""
    inner = unbound(graph)
    if isinstance(inner, CompiledStateGraph):
        return {"messages": [("user", scenario_text(scenario))]}
    if isinstance(inner, Pregel) or isinstance(scenario, str):
        return scenario
    return scenario_fields(scenario)


def unbound(graph: Runnable[Any, Any]) -> object:
    """The graph itself, without what was bound to it."""
    inner: object = graph
    while isinstance(inner, RunnableBindingBase):
        inner = cast(Any, inner).bound
    return inner


def interrupts(output: object) -> Sequence[Interrupt]:
    """What a graph waits for; empty when it has ended."""
    if not isinstance(output, Mapping):
        return ()
    found = cast(Mapping[str, object], output).get(INTERRUPTED)
    return cast(Sequence[Interrupt], found) if found else ()


def is_entrypoint(target: object) -> bool:
    """Whether it is a function under `@entrypoint`: a graph that takes and returns what the function does."""
    return isinstance(target, Pregel) and not isinstance(target, CompiledStateGraph)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; callable objects are asked for their `__call__`."""
    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def is_factory(function: Callable[..., Any]) -> bool:
    """Whether it takes no scenario: nothing at all, or a RunnableConfig alone, as `langgraph dev` calls factories."""
    taken = positional(function)
    if not taken:
        return True
    return len(taken) == 1 and wants_config(function, taken[0].name)


def wants_config(function: Callable[..., Any], name: str) -> bool:
    """Whether a parameter is annotated as a RunnableConfig."""
    try:
        hints = get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError, AttributeError):  # names that exist for type checkers only
        return False
    return hints.get(name) is RunnableConfig


def positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that can be given by position; one of unknown signature is taken to want a scenario."""
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [inspect.Parameter("scenario", inspect.Parameter.POSITIONAL_ONLY)]
    return [each for each in found if each.kind in kinds]


async def in_own_thread(work: Callable[[], Any]) -> Any:
    """Run blocking work in a thread of its own, in a copy of this context. Cancelled, it is left to end by itself."""
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
        except StopIteration as raised:  # no future takes it
            error = RuntimeError(f"the function raised {raised!r}")
            error.__cause__ = raised
        except BaseException as raised:  # noqa: BLE001  # handed to the awaiting task, whatever it is
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop ended first: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="understudy-rollout", daemon=True).start()
    return await done
