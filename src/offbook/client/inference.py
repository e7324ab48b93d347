"""OpenAI clients of an Offbook server. The server is resolved per request, and requests name their trajectory."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

import httpx
from httpx import URL
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from pydantic import PrivateAttr

from offbook.base.config import TrainConfig
from offbook.base.errors import CaptureError, ConfigError, OffbookError, ServerError
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
from offbook.base.wire import (
    CALL_HEADER,
    IDEMPOTENCY_HEADER,
    LATEST,
    LENGTH_HEADER,
    OPEN,
    RECORD_HEADER,
    TRAJECTORY_HEADER,
    TrainEvent,
)

from .backend import one_config, train_groups
from .connection.http import Api, unreachable
from .rollouts.capture import (
    call_answered,
    capture_of_calls,
    check_answer,
    completion_limit,
    forced_temperature,
    replayed,
)

PLACE = "http://model.offbook.invalid"
"""Placeholder for the server's address, replaced when a request is sent."""
LENGTHS = ("max_completion_tokens", "max_tokens")
"""Request fields that limit the completion, in tokens."""
TIMEOUT = httpx.Timeout(1800.0, connect=30.0)
"""Seconds; a model call may take long."""
REMEMBERED = 10_000
"""How many of a client's newest calls are remembered, to notice that an answer comes again."""


def openai_client(find: Callable[[], Awaitable[Api]], url: str | None = None) -> AsyncOpenAI:
    """Create an AsyncOpenAI for the server that `find` returns, usable from any event loop.

    It never retries, since a retry records one more generation. `url` becomes `client.base_url`.
    """
    shown = url or PLACE
    http = httpx_client(LabellingTransport(find, shown))
    return AsyncOpenAI(base_url=f"{shown}/v1", api_key="set-when-sent", max_retries=0, http_client=http)


def httpx_client(transport: httpx.AsyncBaseTransport) -> httpx.AsyncClient:
    """Create the HTTP client for the OpenAI SDK, with a timeout for long model calls."""
    return httpx.AsyncClient(transport=transport, timeout=TIMEOUT)


class LabellingTransport(httpx.AsyncBaseTransport):
    """HTTP transport that redirects requests for the base URL `shown` to the current server.

    It replaces the address and the key, and adds the header that names the call's trajectory.
    """

    def __init__(self, find: Callable[[], Awaitable[Api]], shown: str) -> None:
        self._find = find
        self._root = httpx.URL(shown).raw_path.rstrip(b"/")
        self._answered: dict[str, None] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request. A failure to connect becomes an error response, since the SDK hides the text of exceptions."""
        try:
            api = await self._find()
        except OffbookError as error:
            return _error_response(request, error)
        sent = await self._rewritten(request, api)
        label(sent, api)
        sent.extensions["timeout"] = {**sent.extensions.get("timeout", {}), "connect": api.connect_seconds}
        try:
            answer = await api.transport.handle_async_request(sent)
            api.answered = True
            try:
                self._note(sent, answer)
            except CaptureError as error:
                await answer.aclose()
                return _error_response(request, error, 409)
            return answer
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            try:
                api.alive()
            except OffbookError as ended:
                return _error_response(request, ended)
            return _error_response(request, unreachable(api.url, error))

    def _note(self, sent: httpx.Request, answer: httpx.Response) -> None:
        """Note the recorded call. Raises CaptureError for an answer that was given before, to this request or another."""
        call_id = answer.headers.get(CALL_HEADER)
        if call_id is None:
            return
        requested = sent.headers.get(TRAJECTORY_HEADER)
        if "/r/" not in sent.url.path:  # a route's calls have trajectories of its own
            check_answer(requested, unquote(answer.headers.get(TRAJECTORY_HEADER, requested or "")) or None, call_id)
        if IDEMPOTENCY_HEADER not in sent.headers:
            if call_id in self._answered:
                raise replayed(f"the answer of call {call_id} came a second time")
            self._answered[call_id] = None
            if len(self._answered) > REMEMBERED:
                del self._answered[next(iter(self._answered))]
        call_answered(requested or "", call_id)

    async def _rewritten(self, request: httpx.Request, api: Api) -> httpx.Request:
        home = httpx.URL(api.url)
        path = home.raw_path.rstrip(b"/") + request.url.raw_path.removeprefix(self._root)
        headers = httpx.Headers([(name, value) for name, value in request.headers.raw if name.lower() != b"host"])
        headers["authorization"] = f"Bearer {api.key or 'none'}"
        content = await request.aread()
        temperature, limit = forced_temperature(), completion_limit()
        if (temperature, limit) != (None, None) and request.url.path.endswith("/chat/completions"):
            body: Json = json.loads(content)
            if temperature is not None:
                body["temperature"] = temperature
            if limit is not None and _longest(body, limit) > limit:
                body = {name: value for name, value in body.items() if name not in LENGTHS}
                body["max_completion_tokens"] = limit
                headers[LENGTH_HEADER] = "fit"
            content = json.dumps(body).encode()
        del headers["content-length"]
        url = home.copy_with(raw_path=path)
        return httpx.Request(request.method, url, headers=headers, content=content, extensions=request.extensions)


def label(request: httpx.Request, api: Api) -> None:
    """Add the header with the active capture's trajectory. Outside a capture, ask for a new trajectory for this call."""
    if TRAJECTORY_HEADER in request.headers:
        return
    capture = capture_of_calls()
    if capture is not None:
        capture.sent_through(api)
        request.headers[TRAJECTORY_HEADER] = capture.trajectory.id
    else:
        request.headers[RECORD_HEADER] = "1"


def _longest(body: Json, limit: int) -> int:
    """The request's own limit in tokens; `limit + 1` if it sets none."""
    lengths = [body[name] for name in LENGTHS if isinstance(body.get(name), int)]
    return min(lengths, default=limit + 1)


def _error_response(request: httpx.Request, error: OffbookError, status: int = 503) -> httpx.Response:
    status = error.status if isinstance(error, ServerError) else status
    fault = {
        "message": str(error),
        "type": type(error).__name__,
        "param": None,
        "code": "unreachable" if status >= 500 else "replayed",
    }
    return httpx.Response(status, json={"error": fault}, request=request)


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
            one_config(TrainConfig, config, {}),
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
