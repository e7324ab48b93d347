"""`trained()`: the same app, its chat models answered by the trained policy; nothing is recorded."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import types
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.runnables import Runnable, RunnableBinding, RunnableSequence

from understudy import TrainableModel
from understudy.integration import ConfigError

from .active_capture import ActiveCapture, CallRoute, activate, activated
from .chat_model import ChatUnderstudy
from .endpoint import chat_model, chat_model_at, in_own_loop
from .patches import install
from .selection import Predicate

ENDED = object()


def subclassed(graph: Any, mixin: type, **attributes: Any) -> Any:
    """A copy of the graph whose class is the graph's own with `mixin` before it; `attributes` are the class's."""
    kind = cast(Any, type(graph))
    made_kind = types.new_class(
        kind.__name__, (mixin, kind), exec_body=lambda body: body.update(__module__=kind.__module__)
    )
    for name, value in attributes.items():
        setattr(made_kind, name, value)
    made = cast(Any, object.__new__(made_kind))  # has no static type
    state = copy.copy(graph).__getstate__()
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        made.__dict__.update(state)
    return made


@dataclass(frozen=True)
class Serving:
    """Answers with the models' newest steps, or with fixed ones; from their own server, or from the one at `url`."""

    models: Mapping[TrainableModel, Predicate | None]
    exclude: Predicate | None = None
    step: int | Mapping[str, int] | None = None
    temperature: float | None = None
    url: str | None = None
    api_key: str | None = None

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if isinstance(self.step, int) and len(names) > 1:
            raise ConfigError(
                f"step: several models are served: give each its own, step={{{names[0]!r}: {self.step}, ...}}"
            )
        if isinstance(self.step, Mapping) and (unknown := sorted(set(self.step) - set(names))):
            raise ConfigError(f"step: there is no model {unknown[0]!r} here; there are {', '.join(names)}")

    async def capture(self) -> ActiveCapture:
        """The capture, once the models are registered. Nothing is registered with a `url`."""
        install()
        routes = [CallRoute(await self._target(model), select) for model, select in self.models.items()]
        return ActiveCapture(routes=tuple(routes), exclude=self.exclude)

    def capture_now(self) -> ActiveCapture:
        """The same from sync code."""
        return in_own_loop(self.capture())

    async def _target(self, model: TrainableModel) -> ChatUnderstudy:
        step = self.step.get(model.name) if isinstance(self.step, Mapping) else self.step
        if self.url is not None:
            return chat_model_at(self.url, self.api_key, model, self.temperature, step)
        return await chat_model(model, self.temperature, step)


def serving_function(function: Callable[..., Any], serving: Serving) -> Callable[..., Any]:
    """The function, its models answered by the policy; of a factory, the graph that it makes."""

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
    """The same graph, every way of running it captured. A chain is wrapped whole: a longer chain would take it apart and
    run its steps on the app's own models."""
    whole = RunnableBinding(bound=graph) if isinstance(graph, RunnableSequence) else graph
    return subclassed(whole, ServedRunnable, _serving=serving)


class ServedRunnable:
    """Mixed into a graph's class: every way of running it is captured. Streams run in a context of their own, since a
    generator would leave the capture active in its caller between two items."""

    __slots__ = ()
    _serving: Serving

    def _agent(self) -> Any:
        raise ConfigError(
            "this is the trained app, of which nothing is recorded: train and evaluate the one it was made of"
        )

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
        # v3 gives a coroutine, and takes its items from `astream`.
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
    """The items of a generator that has not begun, made in a context of its own with the capture active."""
    context = copy_context()
    context.run(activate, serving.capture_now())
    try:
        while (item := context.run(next, items, ENDED)) is not ENDED:
            yield item
    finally:
        context.run(cast(Generator[Any], items).close)


async def captured_items_async(items: AsyncIterator[Any], serving: Serving) -> AsyncGenerator[Any]:
    """The same for an async generator."""
    context = copy_context()
    context.run(activate, await serving.capture())
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)

    async def pump() -> None:
        async for item in items:
            await queue.put(item)
        await queue.put(ENDED)

    task = asyncio.get_running_loop().create_task(pump(), context=context)
    task.add_done_callback(lambda _: wake(queue))
    try:
        while not (task.done() and queue.empty()) and (item := await queue.get()) is not ENDED:
            yield item
        await task
    finally:
        task.cancel()


def wake(queue: asyncio.Queue[Any]) -> None:
    """Let a reader of a failed stream see its end."""
    if queue.empty():
        queue.put_nowait(ENDED)
