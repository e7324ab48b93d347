"""An OpenAI client that needs only a server's URL. Its completions carry trajectories."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from httpx import URL
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from pydantic import PrivateAttr

from offbook.base.config import TrainConfig
from offbook.base.errors import ConfigError, ServerError
from offbook.base.types import (
    Json,
    Message,
    MessageOrChoice,
    Tool,
    TrainResult,
    Trajectory,
    TrajectoryGroup,
    recorded_under,
)
from offbook.base.wire import LATEST, OPEN, TrainEvent

from .backend import train_config, train_groups
from .connection.http import Api
from .inference import TIMEOUT, LabellingTransport, httpx_client


class RecordedCompletion(ChatCompletion):
    """A chat completion that also holds the messages and tools of its request."""

    _messages: list[Message] = PrivateAttr(default_factory=list[Message])
    _tools: list[Tool] | None = PrivateAttr(default=None)
    _trajectory: Trajectory | None = PrivateAttr(default=None)

    @property
    def trajectory(self) -> Trajectory:
        """The request's messages and the first choice as a trajectory; the same object on every access.

        If the request named its trajectory (in `extra_body`, a header or the URL), this is the trajectory of that id,
        and every
        call recorded under the id belongs to it: submit that of the last turn.
        """
        if self._trajectory is None:
            items: list[MessageOrChoice] = [*self._messages, self.choices[0]]
            self._trajectory = Trajectory(messages_and_choices=items, tools=self._tools)
            named = recorded_under(self.choices[0])
            if named is not None and not named.startswith(f"{OPEN}-"):
                self._trajectory.id, self._trajectory.captured = named, True
        return self._trajectory

    def answers(self, body: Json) -> None:
        """Store the messages and tools of the request body."""
        self._messages = list(body["messages"])
        self._tools = list(body["tools"]) if isinstance(body.get("tools"), list) else None
        self._trajectory = None  # the SDK constructs objects without private defaults


class AsyncClient(AsyncOpenAI):
    """An AsyncOpenAI client for an Offbook server. The server records its calls. Completions have `.trajectory`, and
    `submit_trajectories` sends one train request. The default of `api_key` is the environment variable OFFBOOK_API_KEY.
    """

    def __init__(self, base_url: str | URL, api_key: str | None = None, **options: Any) -> None:
        """`options` are passed to AsyncOpenAI. `max_retries` is 0 by default, since a retry records one more generation."""
        self.api = Api(str(base_url), api_key or os.environ.get("OFFBOOK_API_KEY"))
        defaults: dict[str, Any] = {
            "max_retries": 0,
            "timeout": TIMEOUT,
            "http_client": httpx_client(LabellingTransport(self._find, self.api.url)),
        }
        super().__init__(base_url=f"{self.api.url}/v1", api_key=self.api.key or "none", **(defaults | options))

    async def _find(self) -> Api:
        return self.api

    async def post(self, path: str, *, cast_to: Any, body: Any = None, **options: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # the SDK's overloads, passed through
        """Send the SDK's request; return chat completions as RecordedCompletion."""
        if cast_to is not ChatCompletion:
            return await super().post(path, cast_to=cast_to, body=body, **options)
        answer: object = await super().post(path, cast_to=RecordedCompletion, body=body, **options)
        if isinstance(answer, RecordedCompletion):  # pyright: ignore[reportUnnecessaryIsInstance]  # a raw response is something else
            answer.answers(body)
        return answer

    async def submit_trajectories(
        self,
        groups: Iterable[TrajectoryGroup],
        *,
        model: str | None = None,
        config: TrainConfig | Mapping[str, object] | None = None,
        request_id: str | None = None,
        on_event: Callable[[TrainEvent], None] | None = None,
        timeout: float | None = None,
    ) -> TrainResult:
        """Train one step on these groups; see `Backend.train` for options and errors.

        `model=None` means "lora:latest": the only model that was registered besides the server's default model, or else
        the default model. Raises ConfigError if several models fit.
        """
        return await train_groups(
            self.api,
            await self._model_name(model),
            groups,
            train_config(config, {}),
            request_id=request_id,
            on_event=on_event,
            timeout=timeout,
        )

    async def _model_name(self, model: str | None) -> str:
        if model not in (None, LATEST):
            return model
        try:
            return (await self.api.latest_model()).name
        except ServerError as error:
            if error.code != "ambiguous_model":
                raise
            raise ConfigError(f"model: {error} with model=") from error
