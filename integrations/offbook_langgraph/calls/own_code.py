"""The code of chat model classes that an app wrote: which of it runs in a capture, and which the trained model replaces.

A router, or a model that adds a prompt to the calls of another one, runs; the call that it makes is captured. Code that reaches
the provider by itself cannot run without paying the provider, so the trained model answers in its place.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, cast

from langchain_core.globals import get_llm_cache
from langchain_core.language_models import BaseChatModel, SimpleChatModel
from langchain_core.messages import BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult, LLMResult
from langchain_core.runnables import Runnable
from langchain_openai.chat_models.base import BaseChatOpenAI

from offbook.client.rollouts.failures import is_app_file
from offbook_langgraph.chat_model import ChatOffbook

from .provider_formats import check_text, to_openai

logger = logging.getLogger("offbook")

GENERATION = ("_generate", "_agenerate", "_stream", "_astream")
"""The methods in which a chat model class makes its call."""
ENTRIES = ("invoke", "ainvoke", "generate", "agenerate", "stream", "astream")
CALLS_OF_RUNNABLES = frozenset({"invoke", "ainvoke"})
HARMLESS = frozenset({"_llm_type", "_identifying_params", "_get_ls_params", "_serialized", "_get_llm_string"})
"""Overridden attributes that change nothing in a call."""
MAX_DEPTH = 4
"""How deep a chat model is looked for in another one's fields."""

Method = Callable[..., Any]
remembered = functools.lru_cache(maxsize=1_000)
"""Remembers what is known of a class. Apps may make classes at each call, so not of all."""


def runs(method: Method, model: BaseChatModel) -> bool:
    """Whether a capture runs this method of a chat model, since it hands the call on; otherwise the trained model answers."""
    return _runs(_plain(method), type(model), _held(model))


def opens(model: BaseChatModel, entry: Method) -> bool:
    """Whether a capture runs the model's own code for a call by this entry point, since that code hands its call on."""
    return _opens(type(model), _plain(entry), _held(model))


@remembered
def _opens(kind: type[BaseChatModel], entry: Method, held: frozenset[str]) -> bool:
    of_app = is_app_file(entry.__code__.co_filename)
    return _runs(entry, kind, held) if of_app else any(_runs(method, kind, held) for method in _methods_of(kind))


@remembered
def _runs(method: Method, kind: type[BaseChatModel], held: frozenset[str]) -> bool:
    owner = _owner(kind, method)
    if owner is BaseChatModel:  # its defaults call the methods of the class below
        return True
    if owner is SimpleChatModel:
        return _runs(_plain(cast(Any, kind)._call), kind, held)
    if is_app_file(method.__code__.co_filename):
        return bool(held) or _hands_on(kind) or _calls_super(method, kind)
    by_code = method.__name__ in GENERATION and CALLS_OF_RUNNABLES & _names(method.__code__)
    return bool(by_code or held & _declared(owner))


@remembered
def _methods_of(kind: type[BaseChatModel]) -> tuple[Method, ...]:
    """The methods by which a class makes its call, without LangChain's defaults."""
    methods = (_plain(getattr(kind, name, None)) for name in (*GENERATION, *ENTRIES))
    return tuple(
        method
        for method in methods
        if isinstance(method, FunctionType) and _owner(kind, method) not in (BaseChatModel, None)
    )


def _plain(method: Any) -> Any:
    """The function below decorators and below our own wrappers."""
    return inspect.unwrap(method) if callable(method) else method


@remembered
def _owner(kind: type[BaseChatModel], method: Method) -> type[Any] | None:
    """The class that defines a method; None if it is not in the class."""
    return next((cls for cls in kind.__mro__ if _plain(cls.__dict__.get(method.__name__)) is method), None)


@remembered
def _hands_on(kind: type[BaseChatModel]) -> bool:
    """Whether the code that a class runs for a call calls a Runnable, or names a chat model."""
    todo: list[Any] = [*_methods_of(kind), _plain(getattr(kind, "_call", None))]
    seen: set[CodeType] = set()
    while todo:
        function = todo.pop()
        if not isinstance(function, FunctionType) or function.__code__ in seen:
            continue
        seen.add(function.__code__)
        if not is_app_file(function.__code__.co_filename):
            continue
        names = _names(function.__code__)
        values = [function.__globals__.get(name) for name in names] + _closure(function)
        if names & CALLS_OF_RUNNABLES or any(_is_other_model(value, kind) for value in values):
            return True
        todo += [_plain(value) for value in values] + [_plain(getattr(kind, name, None)) for name in names]
    return False


def _is_other_model(value: object, kind: type[BaseChatModel]) -> bool:
    if isinstance(value, type):
        return issubclass(value, BaseChatModel) and value not in kind.__mro__
    return isinstance(value, BaseChatModel)


def _calls_super(method: Method, kind: type[BaseChatModel]) -> bool:
    names = _names(method.__code__)
    bases = {cls.__name__ for cls in kind.__mro__[1:]} - {BaseChatModel.__name__}
    return "super" in names or bool(bases & names)


def _closure(function: FunctionType) -> list[object]:
    values: list[object] = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # a name that has no value yet
            continue
    return values


@remembered
def _names(code: CodeType) -> frozenset[str]:
    inner = (_names(value) for value in code.co_consts if isinstance(value, CodeType))
    return frozenset(code.co_names).union(*inner)


def _held(model: BaseChatModel) -> frozenset[str]:
    """The fields and private attributes in which a chat model holds another one."""
    private: Mapping[str, object] = model.__pydantic_private__ or {}
    return frozenset(name for name, value in [*vars(model).items(), *private.items()] if _holds_model(value, 0))


def _holds_model(value: object, depth: int) -> bool:
    if depth == MAX_DEPTH:
        return False
    if isinstance(value, BaseChatModel):
        return True
    if isinstance(value, dict):
        return any(_holds_model(item, depth + 1) for item in cast(dict[object, object], value).values())
    if isinstance(value, list | tuple | set):
        items = cast(Sequence[object], value)
        return any(_holds_model(item, depth + 1) for item in items)
    fields: object = getattr(cast(Any, value), "__dict__", None) if isinstance(value, Runnable) else None
    return _holds_model(fields, depth + 1)


def _declared(kind: type[Any] | None) -> frozenset[str]:
    fields: Mapping[str, object] = getattr(kind, "model_fields", {})
    private: Mapping[str, object] = getattr(kind, "__private_attributes__", {})
    return frozenset([*fields, *private])


def _overridden(kind: type[BaseChatModel]) -> Iterator[str]:
    """The private methods of LangChain's and the provider's classes that the app's class overrides."""
    of_app = _of_app(kind)
    others = [cls for cls in kind.__mro__ if cls not in of_app]
    for name in dict.fromkeys(name for cls in of_app for name in cls.__dict__):
        value = inspect.getattr_static(kind, name)
        if isinstance(_plain(value), FunctionType | property | functools.cached_property):
            known = any(name in cls.__dict__ for cls in others)
            if name == "_call" or (known and name[0] == "_" and name[:2] != "__" and name not in HARMLESS):
                yield name


@remembered
def _of_app(kind: type[Any]) -> tuple[type[Any], ...]:
    return tuple(cls for cls in kind.__mro__ if is_app_file(_file_of(cls)))


def _file_of(cls: type[Any]) -> str:
    """The source file of a class's methods, empty if it has none."""
    codes = (getattr(_plain(value), "__code__", None) for value in cls.__dict__.values())
    return next((code.co_filename for code in codes if code is not None and code.co_filename[:1] != "<"), "")


@remembered
def changed_inside(kind: type[BaseChatModel]) -> tuple[str, ...]:
    """The private methods that the app overrides below those that make the call, such as `_get_request_payload`."""
    return tuple(name for name in _overridden(kind) if name not in (*GENERATION, *ENTRIES, "_call"))


def warn_replaced(model: BaseChatModel) -> None:
    """Warn, once a class, of the app's own code that the trained model replaces."""
    kind = type(model)
    if names := _replaced(kind, _held(model) if _of_app(kind) else frozenset[str]()):
        _warn(kind, names)


@remembered
def _replaced(kind: type[BaseChatModel], held: frozenset[str]) -> str:
    own = [method for method in _methods_of(kind) if is_app_file(method.__code__.co_filename)]
    names: list[str] = [method.__name__ for method in own if not _runs(method, kind, held)]
    if not issubclass(kind, BaseChatOpenAI):
        names += changed_inside(kind)
    return ", ".join(dict.fromkeys(names))


@remembered
def _warn(kind: type[BaseChatModel], names: str) -> None:
    logger.warning(
        "%s: a capture does not run %s of this class. The trained model gets the messages as they were passed to it, and its "
        "answer is returned as it is: what this code adds to prompts or changes in answers is lost. Let it hand its call to "
        "another chat model (self.inner.invoke(...), or super()._generate(...)), whose call is captured; or leave the class "
        "on its own code with exclude=%s",
        kind.__name__,
        names,
        kind.__name__,
    )


class OverriddenMethods:
    """The methods of OpenAI's chat model that the app's class overrides, run on the app's own model."""

    def __init__(self, model: BaseChatOpenAI) -> None:
        self._model = cast(Any, model)

    def payload(self, ours: dict[str, Any], input_: Any, stop: list[str] | None, kwargs: dict[str, Any]) -> Any:
        """The request with what the app's code changes in it. Messages that it leaves alone are the objects of `ours`."""
        kind = cast(type[BaseChatModel], type(self._model))
        provider: Any = next(cls for cls in kind.__mro__ if cls not in _of_app(kind))
        before: dict[str, Any] = provider._get_request_payload(self._model, input_, stop=stop, **kwargs)
        after: dict[str, Any] = self._model._get_request_payload(input_, stop=stop, **kwargs)
        if "messages" not in after:
            _warn(kind, "_get_request_payload, written for the Responses API,")
            return ours
        left: list[dict[str, Any]] = list(ours["messages"])
        messages = [_same_message(message, left) for message in after["messages"]]
        changed = {name: value for name, value in after.items() if before.get(name) != value and name != "messages"}
        kept = {name: value for name, value in ours.items() if name in after or name not in before}
        return {**kept, **to_openai(changed, kind.__name__), "messages": messages}

    def result(self, response: Any, generation_info: dict[str, Any] | None) -> Any:
        """The app's reading of an answer."""
        return self._model._create_chat_result(response, generation_info)

    def chunk(self, chunk: dict[str, Any], kind: type, info: dict[str, Any] | None) -> Any:
        """The app's reading of a chunk."""
        return self._model._convert_chunk_to_generation_chunk(chunk, kind, info)


def _same_message(message: dict[str, Any], left: list[dict[str, Any]]) -> dict[str, Any]:
    """The equal message of `left`, taken out of it, else `message` itself. OpenAI's role for some models is `developer`."""
    plain = {**message, "role": "system"} if message["role"] == "developer" else message
    for index, other in enumerate(left):
        if other == message or {**other, "role": "system" if other["role"] == "developer" else other["role"]} == plain:
            return left.pop(index)
    return plain


def own_methods(model: BaseChatModel) -> OverriddenMethods | None:
    """The overridden methods of an app's subclass of OpenAI's chat model; None for any other."""
    return OverriddenMethods(model) if isinstance(model, BaseChatOpenAI) and changed_inside(type(model)) else None


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

    def answer_for(self, original: BaseChatModel) -> ChatOffbook | None:
        """The trained model in place of `original`; None when `original` answers."""
        return None if self.answerer is None else self.answerer(original)


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
        return method(*args, **kwargs)


@contextmanager
def _active(run: OwnRun) -> Generator[None]:
    previous = _run.get()
    _run.set(run)
    try:
        yield
    finally:
        _run.set(previous)


async def _awaited(run: OwnRun, result: Any) -> Any:
    with _active(run):
        return await result


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
    finally:
        cast(Generator[Any], items).close()


async def _async_items(run: OwnRun, items: AsyncIterator[Any]) -> AsyncIterator[Any]:
    end = object()
    try:
        while True:
            with _active(run):
                item = await anext(items, end)
            if item is end:
                break
            yield item
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
