"""Determines the origin of a chat model call in the app: node, agent, model, tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from langchain_core.callbacks import BaseCallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables.config import var_child_runnable_config

from offbook.base.types import CallOrigin

from .runs import AGENT_NAME


def call_origin(
    original: BaseChatModel,
    tags: list[str] | None,
    metadata: Mapping[str, Any] | None,
    callbacks: object,
    agent: str | None,
) -> CallOrigin:
    """The origin of a call, from the config, the callbacks and the call's own metadata.

    All three are needed, since metadata passed with the call hides the inherited metadata. `agent` is the name in the run
    tree.
    """
    config = var_child_runnable_config.get() or {}
    inherited = callbacks.inheritable_metadata if isinstance(callbacks, BaseCallbackManager) else {}
    facts: dict[str, Any] = {**(config.get("metadata") or {}), **inherited, **(metadata or {})}
    return origin_of(original, facts, config.get("configurable") or {}, tags, agent)


def origin_of(
    original: BaseChatModel | None,
    facts: Mapping[str, Any],
    configurable: Mapping[str, Any],
    tags: list[str] | None,
    agent: str | None,
) -> CallOrigin:
    """The origin from a call's metadata, completed by LangGraph's `configurable` keys.

    `agent`, the name in the run tree, overrides the metadata's: an agent without LangChain's key inherits its parent's.
    """
    namespace = facts.get("langgraph_checkpoint_ns") or configurable.get("checkpoint_ns") or None
    node = facts.get("langgraph_node") or (str(namespace).rsplit("|", 1)[-1].split(":")[0] if namespace else None)
    thread = facts.get("thread_id") or configurable.get("thread_id")
    step: object = facts.get("langgraph_step")
    own: list[str] = (original.tags or []) if original is not None else []
    return CallOrigin(
        node=as_text(node),
        step=step if isinstance(step, int) else None,
        namespace=as_text(namespace),
        agent=agent or as_text(facts.get(AGENT_NAME)),
        thread=as_text(thread),
        model=model_name(original) or as_text(facts.get("ls_model_name")),
        kind=None if original is None else type(original).__name__,
        source=as_text(facts.get("lc_source")),
        tags=tuple(dict.fromkeys(str(tag) for tag in [*(tags or []), *own])),
    )


def as_text(value: object) -> str | None:
    """Convert a metadata value to text: users also store other types under these keys."""
    return None if value is None else str(value)


def model_name(original: BaseChatModel | None) -> str | None:
    """The provider's name of the app's model; None if the class has no such field."""
    name = getattr(original, "model_name", None) or getattr(original, "model", None)
    return None if name is None else str(name)
