"""`trained()`: the app with its chat models answered by the trained model. Nothing is recorded."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass
from typing import Any, cast

from langchain_core.runnables import Runnable, RunnableBinding, RunnableSequence
from pydantic import SecretStr

from offbook import TrainableModel
from offbook.base.errors import ConfigError
from offbook.base.options import RunOptions, option
from offbook_langgraph.calls.active_capture import (
    ActiveCapture,
    CallRoute,
    activate,
    activated,
)
from offbook_langgraph.calls.capture_block import Models
from offbook_langgraph.calls.langchain_patches import install
from offbook_langgraph.calls.origins import Predicate
from offbook_langgraph.chat_model import (
    ChatOffbook,
    chat_model,
    in_own_loop,
)

ENDED = object()
"""Marks the end of a stream."""


def subclassed(graph: Any, mixin: type, **attributes: Any) -> Any:
    """A copy of the graph whose class is a new subclass of `mixin` and the graph's class, with class `attributes`."""
    kind = cast(Any, type(graph))
    subclass = types.new_class(
        kind.__name__, (mixin, kind), exec_body=lambda body: body.update(__module__=kind.__module__)
    )
    for name, value in attributes.items():
        setattr(subclass, name, value)
    instance = cast(Any, object.__new__(subclass))  # has no static type
    state = copy.copy(graph).__getstate__()
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
    else:
        instance.__dict__.update(state)
    return instance


@dataclass(frozen=True)
class ServingOptions(RunOptions):
    """The arguments of `trained`."""

    step: int | Mapping[str, int] | None = option(None, "a step, or one per model name; None: the newest")
    _: KW_ONLY
    url: str | None = option(None, "a server that has the model; None: the model's own")
    api_key: str | None = option(None, "its key")
    temperature: float | None = option(None, "of all calls; None: the server's default")
    model: Models | None = option(None, "the model of an app that was wrapped without one, or another than its own")


@dataclass(frozen=True)
class Serving:
    """How a served app is answered: which models, at which steps, from which server. Raises ConfigError for a step that
    names no model here."""

    models: Mapping[TrainableModel, Predicate | None]
    exclude: Predicate | None
    options: ServingOptions

    def __post_init__(self) -> None:
        step, names = self.options.step, [model.name for model in self.models]
        if isinstance(step, int) and len(names) > 1:
            raise ConfigError(f"step: several models are served: give each its own, step={{{names[0]!r}: {step}, ...}}")
        if isinstance(step, Mapping) and (unknown := sorted(set(step) - set(names))):
            raise ConfigError(f"step: there is no model {unknown[0]!r} here; there are {', '.join(names)}")

    async def capture(self) -> ActiveCapture:
        """Create the capture that redirects the app's calls. Registers the models, unless there is a `url`."""
        install()
        routes = [CallRoute(await self._target(model), select) for model, select in self.models.items()]
        return ActiveCapture(routes=tuple(routes), exclude=self.exclude)

    def capture_now(self) -> ActiveCapture:
        """Like `capture`, for sync code."""
        return in_own_loop(self.capture())

    async def _target(self, model: TrainableModel) -> ChatOffbook:
        chosen = self.options
        step = chosen.step.get(model.name) if isinstance(chosen.step, Mapping) else chosen.step
        if chosen.url is None:
            return await chat_model(model, chosen.temperature, step)
        connection: dict[str, Any] = {"base_url": chosen.url}
        if chosen.api_key is not None:
            connection["api_key"] = SecretStr(chosen.api_key)
        return ChatOffbook(model=model.inference_name(step), temperature=chosen.temperature, **connection)


def serving_function(function: Callable[..., Any], serving: Serving) -> Callable[..., Any]:
    """Wrap a function so that the trained model answers its calls. The graph that a factory returns is wrapped too."""

    def served_output(output: Any) -> Any:
        if isinstance(output, Runnable):
            return served_runnable(cast(Runnable[Any, Any], output), serving)
        return output

    @functools.wraps(function)
    async def served_async(*args: Any, **kwargs: Any) -> Any:
        with activated(await serving.capture()):
            return served_output(await function(*args, **kwargs))

    async def awaited(outcome: Any, capture: ActiveCapture) -> Any:
        with activated(capture):
            return served_output(await outcome)

    @functools.wraps(function)
    def served(*args: Any, **kwargs: Any) -> Any:
        capture = serving.capture_now()
        with activated(capture):
            outcome = function(*args, **kwargs)
        return awaited(outcome, capture) if inspect.isawaitable(outcome) else served_output(outcome)

    return served_async if inspect.iscoroutinefunction(inspect.unwrap(function)) else served


def served_runnable(graph: Runnable[Any, Any], serving: Serving) -> Any:
    """A copy of the graph whose every run method is captured.

    A chain is put inside a binding: otherwise a longer chain would split it and run its steps on the app's own models.
    """
    whole = RunnableBinding(bound=graph) if isinstance(graph, RunnableSequence) else graph
    return subclassed(whole, ServedRunnable, _serving=serving)


class ServedRunnable:
    """Mixed into a graph's class: every run method activates the capture.

    Streams run in their own context, since a generator would leave the capture active in its caller between two items.
    """

    __slots__ = ()
    _serving: Serving

    def _agent(self) -> Any:
        raise ConfigError("this is a trained() app: call train and evaluate on the app that it came from")

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        with activated(self._serving.capture_now()):
            return cast(Runnable[Any, Any], super()).invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        with activated(await self._serving.capture()):
            return await cast(Runnable[Any, Any], super()).ainvoke(input, config, **kwargs)

    def batch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        with activated(self._serving.capture_now()):
            return cast(Runnable[Any, Any], super()).batch(inputs, config, **kwargs)

    async def abatch(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> list[Any]:
        with activated(await self._serving.capture()):
            return await cast(Runnable[Any, Any], super()).abatch(inputs, config, **kwargs)

    def batch_as_completed(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> Generator[Any]:
        items = cast(Runnable[Any, Any], super()).batch_as_completed(inputs, config, **kwargs)
        return captured_items(items, self._serving)

    def abatch_as_completed(self, inputs: list[Any], config: Any = None, **kwargs: Any) -> AsyncGenerator[Any]:
        items = cast(Runnable[Any, Any], super()).abatch_as_completed(inputs, config, **kwargs)
        return captured_items_async(items, self._serving)

    def astream_events(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        items = cast(Any, super()).astream_events(input, config, **kwargs)  # typed for v1 and v2 only
        # v3 returns a coroutine and reads its items from `astream`.
        return items if inspect.isawaitable(items) else captured_items_async(items, self._serving)

    def stream(self, input: Any, config: Any = None, **kwargs: Any) -> Generator[Any]:
        items = cast(Runnable[Any, Any], super()).stream(input, config, **kwargs)
        return captured_items(items, self._serving)

    def astream(self, input: Any, config: Any = None, **kwargs: Any) -> AsyncGenerator[Any]:
        items = cast(Runnable[Any, Any], super()).astream(input, config, **kwargs)
        return captured_items_async(items, self._serving)

    def transform(self, input: Iterator[Any], config: Any = None, **kwargs: Any) -> Generator[Any]:
        items = cast(Runnable[Any, Any], super()).transform(input, config, **kwargs)
        return captured_items(items, self._serving)

    def atransform(self, input: AsyncIterator[Any], config: Any = None, **kwargs: Any) -> AsyncGenerator[Any]:
        items = cast(Runnable[Any, Any], super()).atransform(input, config, **kwargs)
        return captured_items_async(items, self._serving)


def captured_items(items: Iterator[Any], serving: Serving) -> Generator[Any]:
    """Run a generator that has not started in its own context with the capture active, and yield its items."""
    context = copy_context()
    context.run(activate, serving.capture_now())
    try:
        while (item := context.run(next, items, ENDED)) is not ENDED:
            yield item
    finally:
        context.run(cast(Generator[Any], items).close)


async def captured_items_async(items: AsyncIterator[Any], serving: Serving) -> AsyncGenerator[Any]:
    """Like `captured_items`, for an async generator."""
    context = copy_context()
    context.run(activate, await serving.capture())
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)

    async def fill_queue() -> None:
        async for item in items:
            await queue.put(item)
        await queue.put(ENDED)

    task = asyncio.get_running_loop().create_task(fill_queue(), context=context)
    task.add_done_callback(lambda _: end_stream(queue))
    try:
        while not (task.done() and queue.empty()) and (item := await queue.get()) is not ENDED:
            yield item
        await task
    finally:
        task.cancel()


def end_stream(queue: asyncio.Queue[Any]) -> None:
    """Put the end marker into an empty queue, so that the reader of a failed stream stops waiting."""
    if queue.empty():
        queue.put_nowait(ENDED)
