"""Creates the LangChain chat model that calls a TrainableModel, or another LLM behind a comparison's gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from pydantic import SecretStr

from offbook import TrainableModel
from offbook.client.endpoint_model import EndpointModel
from offbook.client.rollouts.sampling import forced_temperature

from .chat_model import ChatOffbook

Result = TypeVar("Result")
Answering: TypeAlias = TrainableModel | EndpointModel
"""A model that can answer an app's calls and have them recorded."""

_by_connection: WeakKeyDictionary[object, ChatOffbook] = WeakKeyDictionary()
"""Chat models by connection: all models of one server share a client."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_by_connection.clear)  # the connections belong to the parent process


async def chat_model(
    model: Answering, temperature: float | None, step: int | None = None, longest: int | None = None
) -> ChatOffbook:
    """Create a chat model for the newest step, for step `step`, or for the endpoint of another LLM.

    Registers the model if needed. An evaluation's temperature overrides `temperature`. `longest`: see `ChatOffbook`.
    """
    api = model.endpoint if isinstance(model, EndpointModel) else await model.api()
    shared = _by_connection.get(api)
    if shared is None:
        shared = ChatOffbook(model=model.name, base_url=f"{api.url}/v1", api_key=SecretStr(api.key or "none"))
        _by_connection[api] = shared
    forced = forced_temperature()
    chosen = temperature if forced is None else forced
    name = model.inference_name(step)
    return shared.model_copy(update={"model_name": name, "temperature": chosen, "longest": longest})


def chat_model_at(
    url: str, api_key: str | None, model: TrainableModel, temperature: float | None, step: int | None
) -> ChatOffbook:
    """Create a chat model for the server at `url`, which must know the model by name. Registers nothing.

    Without `api_key`, the environment variable OFFBOOK_API_KEY is sent, if set.
    """
    root = url.rstrip("/").removesuffix("/v1")
    key = api_key or os.environ.get("OFFBOOK_API_KEY") or "none"
    return ChatOffbook(
        model=model.inference_name(step), base_url=f"{root}/v1", api_key=SecretStr(key), temperature=temperature
    )


def in_own_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine from sync code, also inside a running event loop: in a thread, with a copy of this context."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(copy_context().run, asyncio.run, work).result()
