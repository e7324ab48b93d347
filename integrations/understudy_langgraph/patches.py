"""The class-level wraps: chat models look for an active capture at each call, and threads carry the context."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import thread as pool
from contextvars import ContextVar, copy_context
from typing import Any, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables.config import ensure_config
from langchain_core.tracers.context import register_configure_hook

from understudy.integration import CaptureError

from . import leaks, shared_state
from .active_capture import ActiveCapture, ActiveHandler, active
from .chat_model import ChatUnderstudy
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
_wrapped = "__understudy_original__"
_done_once = False


def install() -> None:
    """Wrap the entry points of all chat model classes that exist now, once each. Inactive, a wrap only looks."""
    global _done_once
    with _lock:
        wrap_subclasses(BaseChatModel, ENTRY_POINTS, wrapped, but=ChatUnderstudy)
        shared_state.watch(wrap_subclasses)
        leaks.watch()
        if not _done_once:
            wrap_classes_to_come()
            carry_context_into_threads()
            register_configure_hook(cast("ContextVar[Any]", ActiveHandler()), inheritable=True)
            _done_once = True


def wrap_classes_to_come() -> None:
    """Chat model classes that are made later, in the middle of a capture too, are wrapped as they are made."""
    announce = cast(Any, BaseChatModel.__pydantic_init_subclass__).__func__

    def announced(cls: type[BaseChatModel], **kwargs: Any) -> None:
        announce(cls, **kwargs)
        wrap_subclasses(cls, ENTRY_POINTS, wrapped, but=ChatUnderstudy)

    BaseChatModel.__pydantic_init_subclass__ = classmethod(announced)  # type: ignore[assignment,method-assign]


def wrap_subclasses(
    base: type[Any],
    names: tuple[str, ...],
    wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]],
    but: type[Any] | None = None,
) -> None:
    """Wrap the methods `names` of a class and of all its subclasses, where they define them, once each."""
    classes: list[type[Any]] = [base]
    while classes:
        found = classes.pop()
        classes += found.__subclasses__()
        if but is None or not issubclass(found, but):
            for name in names:
                method = found.__dict__.get(name)
                if callable(method) and not hasattr(method, _wrapped):
                    made = wrap(name, method)
                    setattr(made, _wrapped, method)
                    setattr(found, name, made)


def wrapped(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The entry point that hands the call to the active capture's stand-in. Works for async methods, as it awaits nothing."""

    @functools.wraps(original)
    def entry_point(self: BaseChatModel, *args: Any, **kwargs: Any) -> Any:
        capture = active()
        if capture is None or is_labelled(self):
            return original(self, *args, **kwargs)
        try:
            stand_in = capture.stand_in(self, *_labels(name, capture, args, kwargs))
            given = kwargs if stand_in is None else to_openai(kwargs)
            if stand_in is not None and stand_in.trajectory_id is not None:
                check_text(_messages(name, args, kwargs))
        except CaptureError as error:
            capture.faults.append(error)  # the app may swallow it
            raise
        except Exception as error:  # a user's select= or exclude=
            fault = CaptureError(f"it cannot be said where a call of {type(self).__name__} goes: {error!r}")
            capture.faults.append(fault)
            raise fault from error
        return original(self, *args, **given) if stand_in is None else getattr(stand_in, name)(*args, **given)

    return entry_point


def is_labelled(model: BaseChatModel) -> bool:
    """Whether its calls have an owner already: a capture's stand-in, or a model that was given a trajectory."""
    return isinstance(model, ChatUnderstudy) and (model.trajectory_id is not None or model.origin is not None)


def _labels(name: str, capture: ActiveCapture, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Tags, metadata and callbacks of a call: `generate` takes them one by one, the streams in a config."""
    if name in ("generate", "agenerate"):
        return kwargs.get("tags"), kwargs.get("metadata"), kwargs.get("callbacks", args[2] if len(args) > 2 else None)
    config = ensure_config(kwargs.get("config", args[1] if len(args) > 1 else None))
    return config.get("tags"), config.get("metadata"), config.get("callbacks")


def _messages(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[BaseMessage]:
    """The messages of a call: `generate` takes lists of them, the streams whatever a chat model can be asked."""
    if name in ("generate", "agenerate"):
        batches: list[list[BaseMessage]] = args[0] if args else kwargs["messages"]
        return [message for batch in batches for message in batch]
    asked: Any = args[0] if args else kwargs["input"]
    if isinstance(asked, str):
        return []
    return asked.to_messages() if isinstance(asked, PromptValue) else convert_to_messages(asked)


def carry_context_into_threads() -> None:
    """Plain threads and executors start without ContextVars before Python 3.14: hand them the submitter's context."""
    submit, start = ThreadPoolExecutor.submit, threading.Thread.start

    @functools.wraps(submit)
    def submit_in_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        if active() is None:
            return submit(self, fn, *args, **kwargs)
        return submit(self, copy_context().run, fn, *args, **kwargs)

    @functools.wraps(start)
    def start_in_context(self: threading.Thread) -> None:
        if active() is not None and getattr(self, "_target", None) is not getattr(pool, "_worker", None):
            run = self.run
            self.run = functools.partial(copy_context().run, run)
        start(self)

    ThreadPoolExecutor.submit = submit_in_context
    threading.Thread.start = start_in_context
