"""Which calls of the running code are redirected, where to, and under which trajectory."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables.config import var_child_runnable_config

from understudy.types import CallOrigin

from .chat_model import ChatUnderstudy

Select = Callable[[CallOrigin], bool]
"""Whether a call made there is redirected; the others go to the app's own model."""

CARRIED = ("stop", "max_tokens")
"""Settings of the app's model that its stand-in keeps. Not temperature and seed: they belong to the training."""


@dataclass(frozen=True)
class Capture:
    """Calls made while it is active go to `target` under `trajectory_id`, where `select` agrees."""

    target: ChatUnderstudy
    trajectory_id: str | None
    select: Select | None = None

    def stand_in(
        self,
        original: BaseChatModel,
        tags: list[str] | None,
        metadata: Mapping[str, Any] | None,
        callbacks: object,
    ) -> ChatUnderstudy | None:
        """A copy of the target for one call of `original`; None when the call is not selected."""
        origin = call_origin(original, tags, metadata, callbacks)
        if self.select is not None and not self.select(origin):
            return None
        kept: dict[str, Any] = {"fit": True, "cache": False, "tags": original.tags, "metadata": original.metadata}
        kept["callbacks"] = original.callbacks
        kept |= {name: value for name in CARRIED if (value := getattr(original, name, None)) is not None}
        return self.target.model_copy(update={**kept, "trajectory_id": self.trajectory_id, "origin": origin})


_active: ContextVar[Capture | None] = ContextVar("understudy_langgraph_capture", default=None)


def active() -> Capture | None:
    """The capture that is active here."""
    return _active.get()


def activate(capture: Capture) -> None:
    """Make `capture` the active one in this context, for good: for contexts that are thrown away."""
    _active.set(capture)


@contextmanager
def activated(capture: Capture) -> Generator[Capture]:
    """Make `capture` the active one in this context; the patches must be installed."""
    token = _active.set(capture)
    try:
        yield capture
    finally:
        _active.reset(token)


def call_origin(
    original: BaseChatModel, tags: list[str] | None, metadata: Mapping[str, Any] | None, callbacks: object
) -> CallOrigin:
    """Where the call is made, from three sources, because metadata given at the call hides the inherited one."""
    config = var_child_runnable_config.get() or {}
    inherited = callbacks.inheritable_metadata if isinstance(callbacks, BaseCallbackManager) else {}
    facts: dict[str, Any] = {**(config.get("metadata") or {}), **inherited, **(metadata or {})}
    configurable = config.get("configurable") or {}
    namespace = facts.get("langgraph_checkpoint_ns") or configurable.get("checkpoint_ns") or None
    node = facts.get("langgraph_node") or (str(namespace).rsplit("|", 1)[-1].split(":")[0] if namespace else None)
    thread = facts.get("thread_id") or configurable.get("thread_id")
    name = getattr(original, "model_name", None) or getattr(original, "model", None)
    return CallOrigin(
        node=node,
        step=facts.get("langgraph_step"),
        namespace=namespace,
        agent=facts.get("lc_agent_name"),
        thread=None if thread is None else str(thread),
        model=None if name is None else str(name),
        tags=tuple(dict.fromkeys([*(tags or []), *(original.tags or [])])),
    )
