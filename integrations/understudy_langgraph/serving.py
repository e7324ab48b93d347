"""`trained()`: the same app, its chat models answered by the trained policy; nothing is recorded."""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# (a class made of any graph's class has no static type)

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextvars import copy_context
from typing import Any, TypeVar, cast

from langchain_core.runnables import Runnable

from understudy.client.model import TrainableModel

from .capture import Capture, activate, activated
from .endpoint import chat_model, chat_model_now
from .patches import install

T = TypeVar("T")
ENDED = object()


def subclassed(graph: Any, mixin: type, **attributes: Any) -> Any:
    """A copy of the graph whose class is the graph's own with `mixin` before it; `attributes` are the class's."""
    kind = type(graph)
    made_kind = types.new_class(
        kind.__name__, (mixin, kind), exec_body=lambda body: body.update(__module__=kind.__module__)
    )
    for name, value in attributes.items():
        setattr(made_kind, name, value)
    made: Any = object.__new__(made_kind)
    state = copy.copy(graph).__getstate__()
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
    else:
        made.__dict__.update(state)
    return made


class Serving:
    """Answers with a model's newest step, or with a fixed one."""

    def __init__(self, model: TrainableModel, step: int | None, temperature: float | None) -> None:
        self._model = model
        self._step = step
        self._temperature = temperature

    async def capture(self) -> Capture:
        """The capture, once the model is registered."""
        install()
        return Capture(await chat_model(self._model, self._temperature, self._step), None)

    def capture_now(self) -> Capture:
        """The same without awaiting: outside an event loop the model is registered, inside it must have been."""
        install()
        return Capture(chat_model_now(self._model, self._temperature, self._step), None)


def serving_function(function: Callable[..., Any], serving: Serving) -> Callable[..., Any]:
    """The function, its models answered by the policy."""

    @functools.wraps(function)
    async def served_async(*args: Any, **kwargs: Any) -> Any:
        with activated(await serving.capture()):
            return await function(*args, **kwargs)

    @functools.wraps(function)
    def served(*args: Any, **kwargs: Any) -> Any:
        with activated(serving.capture_now()):
            return function(*args, **kwargs)

    return served_async if inspect.iscoroutinefunction(inspect.unwrap(function)) else served


class ServedRunnable:
    """Mixed into a graph's class: every way of running it is captured. Streams run in a context of their own, since a
    generator would leave the capture active in its caller between two items."""

    __slots__ = ()
    _serving: Serving

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        with activated(self._serving.capture_now()):
            return cast(Runnable[Any, Any], super()).invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        with activated(await self._serving.capture()):
            return await cast(Runnable[Any, Any], super()).ainvoke(input, config, **kwargs)

    def stream(self, input: Any, config: Any = None, **kwargs: Any) -> Generator[Any]:
        context = copy_context()
        context.run(activate, self._serving.capture_now())
        items = cast(Generator[Any], cast(Runnable[Any, Any], super()).stream(input, config, **kwargs))
        try:
            while (item := context.run(next, items, ENDED)) is not ENDED:
                yield item
        finally:
            context.run(items.close)

    async def astream(self, input: Any, config: Any = None, **kwargs: Any) -> AsyncGenerator[Any]:
        context = copy_context()
        context.run(activate, await self._serving.capture())
        items = cast(Runnable[Any, Any], super()).astream(input, config, **kwargs)
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
