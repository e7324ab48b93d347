"""Patches: chat model classes look for an active capture at every call, and threads inherit the context."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as pool
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables.config import ensure_config
from langchain_core.tracers.context import register_configure_hook

from offbook.base.errors import CaptureError
from offbook.base.redaction import error_text
from offbook.client.rollouts.capture import is_outside
from offbook_langgraph.chat_model import ChatOffbook

from . import leaks, shared_state
from .active_capture import ActiveCapture, ActiveHandler, active
from .origins import CallLabels
from .own_code import GENERATION, OwnRun, answer, opens, own_run, run_inside, runs, stays, warn_replaced, without_cache
from .provider_formats import check_text, to_openai

ENTRY_POINTS = (
    "generate",
    "agenerate",
    "stream",
    "astream",
    "_chat_model_stream_v3",
    "_achat_model_stream_v3",
)
"""Every call of a chat model passes through one of these."""

_lock = threading.Lock()
_wrapped = "__offbook_original__"
_done_once = False


def install() -> None:
    """Wrap the entry points of all existing chat model classes, once. Without an active capture a wrapper changes nothing."""
    global _done_once
    with _lock:
        wrap_subclasses(BaseChatModel, ENTRY_POINTS, wrapped, but=ChatOffbook)
        for kind in BaseChatModel.__subclasses__():
            wrap_subclasses(kind, GENERATION, wrapped_generation, but=ChatOffbook)
        shared_state.watch(wrap_subclasses)
        leaks.watch()
        if not _done_once:
            wrap_future_subclasses()
            carry_context_into_threads()
            register_configure_hook(cast("ContextVar[Any]", ActiveHandler()), inheritable=True)
            _done_once = True


def wrap_future_subclasses() -> None:
    """Wrap chat model classes that are defined later, also during a capture."""
    original_hook = cast(Any, BaseChatModel.__pydantic_init_subclass__).__func__

    def hook(cls: type[BaseChatModel], **kwargs: Any) -> None:
        original_hook(cls, **kwargs)
        wrap_subclasses(cls, ENTRY_POINTS, wrapped, but=ChatOffbook)
        wrap_subclasses(cls, GENERATION, wrapped_generation, but=ChatOffbook)

    BaseChatModel.__pydantic_init_subclass__ = classmethod(hook)  # type: ignore[assignment,method-assign]


def wrap_subclasses(
    base: type[Any],
    names: tuple[str, ...],
    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    but: type[Any] | None = None,
) -> None:
    """Wrap the methods `names` of a class and its subclasses where a class defines them, once. Skips subclasses of `but`."""
    classes: list[type[Any]] = [base]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if but is None or not issubclass(cls, but):
            for name in names:
                method = cls.__dict__.get(name)
                if callable(method) and not hasattr(method, _wrapped):
                    wrapper = wrap(name, method)
                    setattr(wrapper, _wrapped, method)
                    setattr(cls, name, wrapper)


def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an entry point so that the active capture's model answers the call.

    Works for sync, async and streaming methods, since it returns their result without awaiting it.
    """

    @functools.wraps(original)
    def entry_point(self: BaseChatModel, *args: Any, **kwargs: Any) -> Any:
        capture, run = active(), own_run()
        if capture is None or is_labelled(self):
            return original(self, *args, **kwargs)
        if run is not None and (run.model is self or run.answerer is None):  # decided further out
            return original(self, *args, **kwargs)
        labels = _labels(name, args, kwargs)
        if (judge := capture.site(labels.callbacks).judge) is not None:
            capture.count_judge(judge, self, labels)
            return run_inside(stays(), name, original, self, *args, **kwargs)
        with _faults_kept(capture, self):
            if opens(self, original):
                stand_in, own = None, capture.own_run(self, labels)
            else:
                stand_in, own = capture.stand_in(self, labels), stays() if run is not None else None
            arguments = kwargs if stand_in is None else to_openai(kwargs, type(self).__name__)
            if stand_in is not None and stand_in.trajectory_id is not None:
                check_text(_messages(name, args, kwargs))
        if stand_in is None:
            return _on_its_own(own, name, original, self, args, kwargs)
        warn_replaced(self)
        return getattr(stand_in, name)(*args, **arguments)

    return entry_point


@contextmanager
def _faults_kept(capture: ActiveCapture, model: BaseChatModel) -> Generator[None]:
    """Keep a CaptureError for the end of the block, since the app may swallow it."""
    try:
        yield
    except CaptureError as error:
        capture.faults.append(error)
        raise
    except Exception as error:  # a user's select= or exclude=
        fault = CaptureError(
            f"select= or exclude= failed on a call of {type(model).__name__}, so it has no target: {error_text(error)}"
        )
        capture.faults.append(fault)
        raise fault from error


def _on_its_own(
    run: OwnRun | None, name: str, method: Callable[..., Any], model: BaseChatModel, args: Any, kwargs: dict[str, Any]
) -> Any:
    """A call that the app's own code answers. `run`: where the calls of that code go; None: each is selected by itself."""
    if run is None:
        return method(model, *args, **kwargs)
    if run.model is not None:
        run.model = model = without_cache(model)
    return run_inside(run, name, method, model, *args, **kwargs)


def wrapped_generation(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method in which a chat model class makes its call, for calls by the code of the app's own classes."""

    @functools.wraps(original)
    def generation(self: BaseChatModel, *args: Any, **kwargs: Any) -> Any:
        capture, run = active(), own_run()
        if capture is None or run is None or run.answerer is None or is_labelled(self):
            return original(self, *args, **kwargs)
        if run.model is self:
            if runs(original, self):
                return original(self, *args, **kwargs)
            warn_replaced(self)
            stand_in = run.answer_for(self)
        elif opens(self, original):
            return _on_its_own(capture.own_run(self, CallLabels()), name, original, self, args, kwargs)
        else:
            stand_in = capture.stand_in(self, CallLabels())
        if stand_in is None:
            return run_inside(stays(), name, original, self, *args, **kwargs)
        return answer(stand_in, name, type(self).__name__, args, kwargs)

    return generation


def is_labelled(model: BaseChatModel) -> bool:
    """Whether the model's calls are labelled already: it is a capture's copy, or the app set its trajectory."""
    return isinstance(model, ChatOffbook) and (model.trajectory_id is not None or model.origin is not None)


def _labels(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallLabels:
    """Tags, metadata and callbacks of a call. `generate` takes them as arguments, the streaming methods in a config."""
    if name in ("generate", "agenerate"):
        callbacks = kwargs.get("callbacks", args[2] if len(args) > 2 else None)
        return CallLabels(kwargs.get("tags"), kwargs.get("metadata"), callbacks)
    config = ensure_config(kwargs.get("config", args[1] if len(args) > 1 else None))
    return CallLabels(config.get("tags"), config.get("metadata"), config.get("callbacks"))


def _messages(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[BaseMessage]:
    """The messages of a call. `generate` takes lists of messages, the streaming methods any chat model input."""
    if name in ("generate", "agenerate"):
        batches: list[list[BaseMessage]] = args[0] if args else kwargs["messages"]
        return [message for batch in batches for message in batch]
    prompt: Any = args[0] if args else kwargs["input"]
    if isinstance(prompt, str):
        return [HumanMessage(prompt)]
    return prompt.to_messages() if isinstance(prompt, PromptValue) else convert_to_messages(prompt)


def carry_context_into_threads() -> None:
    """Make threads and executors inherit the submitter's ContextVars, which plain ones do not before Python 3.14."""
    submit, start = ThreadPoolExecutor.submit, threading.Thread.start

    @functools.wraps(submit)
    def submit_in_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if active() is None and not is_outside():
            return submit(self, fn, *args, **kwargs)
        return submit(self, copy_context().run, fn, *args, **kwargs)

    @functools.wraps(start)
    def start_in_context(self: threading.Thread) -> None:
        if (active() is not None or is_outside()) and getattr(self, "_target", None) is not getattr(
            pool, "_worker", None
        ):
            run = self.run
            self.run = functools.partial(copy_context().run, run)
        start(self)

    ThreadPoolExecutor.submit = submit_in_context
    threading.Thread.start = start_in_context
