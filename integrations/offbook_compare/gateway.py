"""A small OpenAI-compatible endpoint in this process that lets other LLMs answer an app."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import socket
import threading
from collections.abc import Iterable, Mapping
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from offbook.base import clock
from offbook.base.errors import (
    BudgetExceeded,
    ConfigError,
    LlmError,
    MissingExtraError,
)
from offbook.base.server_sent_events import EVENT_STREAM
from offbook.base.types import (
    CUT_OFF,
    CallStatus,
    CallTrace,
    Json,
    OutputTrace,
    new_id,
)
from offbook.base.wire import CALL_HEADER, OPEN, TRAJECTORY_HEADER
from offbook.client.connection.http import Api
from offbook.client.model import EndpointModel
from offbook.client.rollouts.capture import leave_captures
from offbook.http_listener.access_checks import AccessChecks, Application, Receive, Scope, Send, respond, single_key
from offbook.llms.llm import Llm
from offbook.llms.provider import ChatAnswer, Tokens
from offbook.openai_dialect.chat_answer import WHOLE, chunks_of, error_body, events, head, usage, wants_usage

if TYPE_CHECKING:
    import uvicorn

PATH = re.compile(r"(?:/t/(?P<trajectory>[^/?]+))?/v1/chat/completions/?")
PURPOSE = "compare"
"""Purpose under which spending on candidates is counted."""
LARGEST_REQUEST = 32 * 2**20
"""Bytes of a request's body at most, as on the server."""
END_SECONDS = 1
"""How long running requests get to finish when the gateway ends."""
LASTING = (BudgetExceeded, ConfigError, MissingExtraError)
"""Errors that every further call would have too."""


class Gateway:
    """Lets other LLMs answer an app: `with Gateway({"name": Llm(...)}) as gateway`, then `gateway.model("name")`.

    Calls count in the enclosing `budget` block. `fault` is an error that every further call would have too, such as a wrong
    key or an exhausted budget.
    """

    def __init__(self, llms: Mapping[str, Llm]) -> None:
        self.fault: Exception | None = None
        self._llms = dict(llms)
        self._key = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._calls: dict[str, list[CallTrace]] = {}

    def __enter__(self) -> Gateway:
        if not self._llms:
            return self  # nothing to answer with: no listener, and no extra is needed
        self._server = _server(AccessChecks(self._respond, single_key(self._key), LARGEST_REQUEST))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)  # all rollouts begin at once
        self._api = Api(f"http://127.0.0.1:{self._listener.getsockname()[1]}", self._key)
        self._context = copy_context()  # contains the enclosing budget
        self._context.run(leave_captures)
        self._thread = threading.Thread(target=self._serve, name="gateway", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._llms:
            self._server.should_exit = True
            self._thread.join()

    def _serve(self) -> None:
        """Answer requests until the end; then cancel those that run. The thread's target."""
        self._context.run(asyncio.run, self._server.serve([self._listener]))

    def model(self, name: str) -> EndpointModel:
        """The model that the LLM of this name answers."""
        return EndpointModel(name, self._api)

    def take_calls(self, trajectories: Iterable[str]) -> list[CallTrace]:
        """Remove and return the calls of these trajectories, in order of their start."""
        with self._lock:
            calls = [call for name in trajectories for call in self._calls.pop(name, [])]
        return sorted(calls, key=lambda call: call.started_at)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that has the key."""
        path = PATH.fullmatch(scope["path"])
        if path is None or scope["method"] != "POST":
            return await respond(send, 404, _error(f"no such path: {scope['path']}", "not_found"))
        content, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            content += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            body: Any = json.loads(content)
        except (ValueError, RecursionError) as error:
            return await respond(send, 400, _error(f"the body is not JSON: {error}", "invalid_request_error"))
        named = dict(scope["headers"]).get(TRAJECTORY_HEADER.encode(), b"").decode("latin-1")
        status, answer = await self.answer(body, path["trajectory"] or named or new_id(OPEN))
        headers = {"x-should-retry": "false"}  # the Llm has already retried
        if status != 200:
            return await respond(send, status, answer, headers)
        headers[CALL_HEADER] = answer["id"]
        if not body.get("stream"):
            return await respond(send, 200, answer, headers)
        stream = events(chunks_of(answer, with_usage=wants_usage(body) and "usage" in answer))
        return await respond(send, 200, b"".join(stream), headers | {"content-type": EVENT_STREAM})

    async def answer(self, body: Json, trajectory: str) -> tuple[int, Json]:
        """Answer a request; returns HTTP status and body."""
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):  # pyright: ignore[reportUnknownMemberType]
            return 400, _error("a JSON object with `messages` is needed", "invalid_request_error")
        request = cast(dict[str, Json], body)
        llm = self._llms.get(str(request.get("model")))
        if llm is None:
            return 404, _error(f"no candidate is named {request.get('model')!r}", "model_not_found")
        if self.fault is not None:
            return 402, _error(str(self.fault), type(self.fault).__name__)
        try:
            call = _begun(request, trajectory, llm.options.model)
        except ValidationError as error:  # before anything is paid for it
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            return 400, _error(f"{where}: {first['msg']}", "invalid_request_error")
        try:
            answer = await llm.chat(request["messages"], request, PURPOSE)
        except LlmError as error:
            if error.lasting:
                self.fault = error
            return 400 if error.kind == "filtered" else 502, _error(str(error), error.kind)
        except LASTING as error:
            self.fault = error
            return 402, _error(str(error), type(error).__name__)
        return 200, self._record(call, answer, str(request["model"]))

    def _record(self, begun: CallTrace, answer: ChatAnswer, name: str) -> Json:
        """Store the call, and return the completion under the candidate's name, whose choices name the call."""
        ended = clock.end_of(begun.started_at)
        tokens = answer.tokens or Tokens(0, 0)  # a provider that reports none
        outputs = tuple(_output(choice, 0 if number else tokens[1]) for number, choice in enumerate(answer.choices))
        measured = {"prompt_tokens": tokens[0], "outputs": outputs, "status": outputs[0].status, "cost": answer.cost}
        timed = {"started_at": ended - answer.seconds, "ended_at": ended}
        with self._lock:
            self._calls.setdefault(begun.trajectory_id, []).append(begun.model_copy(update=measured | timed))
        mark = {"trajectory_id": begun.trajectory_id, "call_id": begun.id, "step": 0}
        choices = [{**choice, "offbook": mark | {"index": choice["index"]}} for choice in answer.choices]
        completion = head(WHOLE, begun.id, int(begun.started_at), name) | {"choices": choices}
        return completion if answer.tokens is None else completion | {"usage": usage(*answer.tokens)}


def _begun(request: dict[str, Json], trajectory: str, model: str) -> CallTrace:
    """The record of a call that is not answered yet. Raises ValidationError for what no record can hold."""
    return CallTrace.model_validate(
        {
            "id": new_id("call"),
            "trajectory_id": trajectory,
            "model": model,
            "step": 0,
            "status": CallStatus.COMPLETE,
            "sampling": {
                name: request[name] for name in ("temperature", "top_p") if isinstance(request.get(name), int | float)
            },
            "messages": request["messages"],
            "tools": request.get("tools") or None,
            "prompt_tokens": 0,
            "outputs": (),
            "started_at": clock.now(),
            "ended_at": clock.now(),
        }
    )


def _output(choice: Json, tokens: int) -> OutputTrace:
    """A choice as recorded. Providers report the sum of all choices' tokens: it counts with the first."""
    status = CallStatus.TRUNCATED if choice["finish_reason"] == CUT_OFF else CallStatus.COMPLETE
    return OutputTrace(
        index=choice["index"],
        message={"role": "assistant", **choice["message"]},
        finish_reason=choice["finish_reason"],
        status=status,
        tokens=tokens,
        logprob_mean=None,
        logprob_min=None,
    )


def _error(message: str, code: str) -> Json:
    return error_body(message, code, code=code)


def _server(application: Application) -> uvicorn.Server:
    """The HTTP server of an application. Raises MissingExtraError."""
    try:
        import uvicorn

        from offbook.http_listener.config import listener_config
    except ImportError as error:
        raise MissingExtraError("uvicorn and httptools", "judge") from error
    config = listener_config(application)
    config.timeout_graceful_shutdown = END_SECONDS
    return uvicorn.Server(config)
