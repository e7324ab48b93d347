"""Runs of an app's chat model class on its own code, in which the calls that the code makes are captured."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult

from offbook_langgraph.chat_model import ChatOffbook

from .own_code import warn_unanswered
from .provider_formats import check_text, to_openai

ASYNC_STREAMS = ("astream", "_astream", "_aiter_v2_events")
STREAMS = ("stream", "_stream", "_iter_v2_events")
EVENTS = {"_chat_model_stream_v3": "_iter_v2_events", "_achat_model_stream_v3": "_aiter_v2_events"}
"""Entry points that return before the model's code runs, and the generator in which it runs later."""


@dataclass(eq=False)
class OwnRun:
    """A call of `model` whose own code runs. `answerer` creates the trained model for a call that the code makes of the chat
    model in its argument; None: the calls stay on the app's own models."""

    model: BaseChatModel | None
    answerer: Callable[[BaseChatModel], ChatOffbook] | None
    outer: OwnRun | None = None
    answered: bool = False

    def answer_for(self, original: BaseChatModel) -> ChatOffbook | None:
        """The trained model in place of `original`; None when `original` answers."""
        return None if self.answerer is None else self.answerer(original)

    def note_answer(self) -> None:
        """Note that the trained model answers a call of this run."""
        run: OwnRun | None = self
        while run is not None:
            run.answered, run = True, run.outer


_run: ContextVar[OwnRun | None] = ContextVar("offbook_langgraph_own_run", default=None)


def own_run() -> OwnRun | None:
    """The innermost run of this context."""
    return _run.get()


def stays() -> OwnRun:
    """A run whose calls all stay on the app's own models."""
    return OwnRun(None, None)


def without_cache(model: BaseChatModel) -> BaseChatModel:
    """The model, or a copy without its cache: an answer is sampled anew for each call."""
    cached = model.cache or (model.cache is None and get_llm_cache() is not None)
    return model.model_copy(update={"cache": False}) if cached else model


def run_inside(run: OwnRun, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `method(*args, **kwargs)` returns: a result, a coroutine or an iterator. `run` is active while its code runs."""
    if name in ("agenerate", "_agenerate"):
        return _awaited(run, method(*args, **kwargs))
    if name in STREAMS:
        return _items(run, method(*args, **kwargs))
    if name in ASYNC_STREAMS:
        return _async_items(run, method(*args, **kwargs))
    if name in EVENTS:
        return _with_events(run, name, method, args, kwargs)
    with _active(run):
        result = method(*args, **kwargs)
    _check_answered(run)
    return result


@contextmanager
def _active(run: OwnRun) -> Generator[None]:
    previous = _run.get()
    _run.set(run)
    try:
        yield
    finally:
        _run.set(previous)


def _check_answered(run: OwnRun) -> None:
    if run.answerer is not None and not run.answered:
        warn_unanswered(type(run.model))


async def _awaited(run: OwnRun, result: Any) -> Any:
    with _active(run):
        value = await result
    _check_answered(run)
    return value


def _items(run: OwnRun, items: Iterator[Any]) -> Iterator[Any]:
    """Activate the run only between two items: a generator would leave it active in its caller."""
    end = object()
    try:
        while True:
            with _active(run):
                item = next(items, end)
            if item is end:
                break
            yield item
        _check_answered(run)
    finally:
        cast(Generator[Any], items).close()


async def _async_items(run: OwnRun, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """As `_items`."""
    end = object()
    try:
        while True:
            with _active(run):
                item = await anext(items, end)
            if item is end:
                break
            yield item
        _check_answered(run)
    finally:
        await cast(Any, items).aclose()


def _with_events(
    run: OwnRun, name: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The stream of an entry point that returns before its code runs: a copy of the model activates the run when it does."""
    inner, model = EVENTS[name], cast(BaseChatModel, args[0]).model_copy()
    events = getattr(model, inner)

    def observed(*args: Any, **kwargs: Any) -> Any:
        return run_inside(run, inner, events, *args, **kwargs)

    vars(model)[inner] = observed
    if run.model is not None:
        run.model = model
    return method(model, *args[1:], **kwargs)


def answer(stand_in: ChatOffbook, name: str, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the trained model returns for a call of `_generate`, `_agenerate`, `_stream` or `_astream` of a class `kind`."""
    named = dict(zip(("messages", "stop", "run_manager"), args, strict=False)) | kwargs
    messages: list[BaseMessage] = named.pop("messages")
    named.pop("run_manager", None)  # the run of the model whose code makes the call hears of it already
    check_text(messages)
    arguments = to_openai(named, kind)
    quiet = stand_in.model_copy(update={"callbacks": None})
    if name == "_generate":
        return _result(quiet.generate([messages], callbacks=[], **arguments))
    if name == "_agenerate":
        return _async_result(quiet, messages, arguments)
    if name == "_stream":
        return (ChatGenerationChunk(message=chunk) for chunk in quiet.stream(messages, {"callbacks": []}, **arguments))
    return _async_chunks(quiet, messages, arguments)


async def _async_result(model: ChatOffbook, messages: list[BaseMessage], arguments: dict[str, Any]) -> ChatResult:
    return _result(await model.agenerate([messages], callbacks=[], **arguments))


async def _async_chunks(
    model: ChatOffbook, messages: list[BaseMessage], arguments: dict[str, Any]
) -> AsyncIterator[ChatGenerationChunk]:
    async for chunk in model.astream(messages, {"callbacks": []}, **arguments):
        yield ChatGenerationChunk(message=chunk)


def _result(result: LLMResult) -> ChatResult:
    return ChatResult(generations=cast(Any, list(result.generations[0])), llm_output=result.llm_output)
