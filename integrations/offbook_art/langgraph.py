"""Stands for `art.langgraph`: rollouts whose agent takes its chat model from `init_chat_model`."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from offbook.base.errors import ConfigError
from offbook.base.types import Trajectory
from offbook.client.model import Model, TrainableModel
from offbook.client.rollouts.capture import show_calls
from offbook_langgraph import ChatOffbook, capture, observe

__all__ = ["init_chat_model", "wrap_rollout"]

Kind = TypeVar("Kind", bound=Trajectory)
Arguments = ParamSpec("Arguments")

TAG = "offbook.art"
"""LangChain tag of the chat models of `init_chat_model`: other chat models in a rollout stay what they are."""
OTHER_PROVIDERS = ("model_provider", "configurable_fields", "config_prefix")
"""Options of LangChain's `init_chat_model` that choose another model."""
OPENAI_URL = "https://api.openai.com/v1"

_model: ContextVar[Model[Any] | None] = ContextVar("offbook_art_model", default=None)


def wrap_rollout(
    model: Model[Any], rollout: Callable[Arguments, Awaitable[Kind]]
) -> Callable[Arguments, Awaitable[Kind]]:
    """The rollout with the calls of its `init_chat_model` recorded: they become those of the trajectory that it returns,
    and its conversations. Of a model that is not trained here they are its conversations alone."""

    @functools.wraps(rollout)
    async def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Kind:
        if not isinstance(model, TrainableModel):
            async with observe(select={"tag": TAG}, on_leak="ignore") as observed:
                with answering(model):
                    trajectory = await rollout(*args, **kwargs)
            trajectory.messages_and_choices, trajectory.tools = observed.messages_and_choices, observed.tools
            trajectory.additional_histories = observed.additional_histories
            return trajectory
        async with capture(model, select={"tag": TAG}, on_leak="ignore") as captured:
            with answering(model):
                trajectory = await rollout(*args, **kwargs)
        return await owning(trajectory, captured, model)

    return wrapped


def init_chat_model(model: str | None = None, *, temperature: float = 1.0, **options: Any) -> ChatOffbook:
    """The chat model of the enclosing `wrap_rollout`, whatever `model` says. `options` are ChatOpenAI's. An evaluation's
    temperature goes before `temperature`."""
    del model
    chosen = _model.get()
    if chosen is None:
        raise ConfigError("init_chat_model: call it inside a rollout that wrap_rollout(model, rollout) has wrapped")
    own: dict[str, Any] = {name: value for name, value in options.items() if name not in OTHER_PROVIDERS}
    own |= {
        "model": chosen.inference_name(),
        "base_url": chosen.inference_base_url or OPENAI_URL,
        "api_key": chosen.inference_api_key or os.environ.get("OPENAI_API_KEY"),
        "temperature": temperature,
        "tags": [*(own.get("tags") or ()), TAG],
    }
    return ChatOffbook(**own)


@contextmanager
def answering(model: Model[Any]) -> Generator[None]:
    """Inside, `init_chat_model` gives this model."""
    token = _model.set(model)
    try:
        yield
    finally:
        _model.reset(token)


async def owning(trajectory: Kind, captured: Trajectory, model: TrainableModel[Any]) -> Kind:
    """The user's trajectory as the owner of what was captured."""
    trajectory.id, trajectory.captured = captured.id, True
    trajectory.metrics = {**captured.metrics, **trajectory.metrics}
    trajectory.weights, trajectory.unused = captured.weights, captured.unused
    trajectory.tool_runs = captured.tool_runs
    if trajectory.reward is None:
        trajectory.reward = captured.reward
    await show_calls(trajectory, [await model.api()])
    return trajectory
