"""A small OpenAI-compatible endpoint in this process that lets other LLMs answer an app."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, cast

from offbook.base.errors import (
    BudgetExceeded,
    ConfigError,
    LlmError,
    MissingExtraError,
)
from offbook.base.http_access import same
from offbook.base.server_sent_events import EVENT_STREAM
from offbook.base.types import (
    CUT_OFF,
    Call,
    CallOutput,
    CallStatus,
    CallTrace,
    Json,
    Message,
    OutputTrace,
    Sampling,
    new_id,
)
from offbook.base.wire import CALL_HEADER, OPEN, TRAJECTORY_HEADER
from offbook.client.connection.http import Api
from offbook.client.endpoint_model import EndpointModel
from offbook.client.rollouts.capture import leave_captures
from offbook.llms.answer import ChatAnswer
from offbook.llms.llm import Llm
from offbook.openai_dialect.chat_answer import WHOLE, chunks_of, events, head, usage, wants_usage
from offbook.openai_dialect.errors import error_body

from .journal import MeasuredCall

PATH = re.compile(r"(?:/t/(?P<trajectory>[^/?]+))?/v1/chat/completions/?")
PURPOSE = "compare"
"""Purpose under which spending on candidates is counted."""
LASTING = (BudgetExceeded, ConfigError, MissingExtraError)
"""Errors that every further call would have too."""


class RecordedCall:
    """A call that the gateway answered, with its time, tokens and cost. `llm_name`: the LLM's name in litellm."""

    def __init__(self, call: Call, measured: MeasuredCall, llm_name: str) -> None:
        self.call = call
        self.measured = measured
        self._llm_name = llm_name

    def trace(self) -> CallTrace:
        """The call for trace sinks. Tokens of further choices are counted with the first: providers report only sums."""
        call, measured = self.call, self.measured
        outputs = tuple(
            OutputTrace(
                index=output.index,
                message={"role": "assistant", **output.message},
                finish_reason=output.finish_reason,
                status=output.status,
                parse_failure=False,
                tokens=(measured.completion_tokens or 0) if number == 0 else 0,
                logprob_mean=None,
                logprob_min=None,
            )
            for number, output in enumerate(call.outputs)
        )
        return CallTrace(
            id=call.id,
            trajectory_id=call.trajectory_id,
            model=self._llm_name,
            step=0,
            status=call.status,
            sampling=call.sampling,
            constrained=None,
            messages=call.messages,
            tools=call.tools,
            prompt_tokens=measured.prompt_tokens or 0,
            outputs=outputs,
            origin=None,
            error=None,
            started_at=measured.started_at,
            ended_at=call.ended_at,
            cost=measured.cost,
        )


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
        self._calls: dict[str, list[RecordedCall]] = {}
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Gateway:
        handler = type("Handler", (_Handler,), {"gateway": self})
        self._server = _Server(("127.0.0.1", 0), cast("type[BaseHTTPRequestHandler]", handler))
        self._api = Api(f"http://127.0.0.1:{self._server.server_address[1]}", self._key)
        self._context = copy_context()  # contains the enclosing budget
        self._context.run(leave_captures)
        self._threads = [
            threading.Thread(target=self._loop.run_forever, name="gateway-loop", daemon=True),
            threading.Thread(target=self._server.serve_forever, args=(0.05,), name="gateway-http", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in self._threads:
            thread.join()
        self._loop.close()

    def model(self, name: str) -> EndpointModel:
        """The model that the LLM of this name answers."""
        return EndpointModel(name, self._api)

    def take_calls(self, trajectories: Iterable[str]) -> list[RecordedCall]:
        """Remove and return the calls of these trajectories, in order of their start."""
        with self._lock:
            calls = [call for name in trajectories for call in self._calls.pop(name, [])]
        return sorted(calls, key=lambda recorded: recorded.call.started_at)

    def authorised(self, header: str | None) -> bool:
        """Whether a request has the key: other processes of this machine must not spend the user's money."""
        return same((header or ""), f"Bearer {self._key}")

    def answer(self, body: Json, trajectory: str) -> tuple[int, Json]:
        """Answer a request; returns HTTP status and body. Runs in the request's thread."""
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):  # pyright: ignore[reportUnknownMemberType]
            return 400, _error("a JSON object with `messages` is needed", "invalid_request_error")
        request = cast(dict[str, Json], body)
        llm = self._llms.get(str(request.get("model")))
        if llm is None:
            return 404, _error(f"no candidate is named {request.get('model')!r}", "model_not_found")
        if self.fault is not None:
            return 402, _error(str(self.fault), type(self.fault).__name__)
        began = time.time()
        request_coroutine = llm.chat(request["messages"], request, PURPOSE)
        try:
            submitted = self._context.copy().run(asyncio.run_coroutine_threadsafe, request_coroutine, self._loop)
            answer = submitted.result()
        except LlmError as error:
            if error.lasting:
                self.fault = error
            return 400 if error.kind == "filtered" else 502, _error(str(error), error.kind)
        except LASTING as error:
            self.fault = error
            return 402, _error(str(error), type(error).__name__)
        except CancelledError:
            return 503, _error("the comparison has ended", "ended")
        return 200, self._record(request, trajectory, answer, began, llm.options.model)

    def _record(
        self, request: dict[str, Json], trajectory: str, answer: ChatAnswer, began: float, llm_name: str
    ) -> Json:
        """Store the call, and return the completion, whose choices name the call."""
        call_id, ended = new_id("call"), time.time()
        outputs = tuple(_output(choice) for choice in answer.choices)
        call = Call(
            id=call_id,
            trajectory_id=trajectory,
            model=str(request["model"]),
            step=0,
            status=outputs[0].status,
            sampling=_sampling(request),
            messages=tuple(request["messages"]),
            tools=tuple(request["tools"]) if request.get("tools") else None,
            prompt_ids=(),
            outputs=outputs,
            started_at=began,
            ended_at=ended,
        )
        measured = MeasuredCall(
            seconds=answer.seconds,
            prompt_tokens=None if answer.tokens is None else answer.tokens.prompt,
            completion_tokens=None if answer.tokens is None else answer.tokens.completion,
            cost=answer.cost,
            started_at=ended - answer.seconds,
            cut=call.status == CallStatus.TRUNCATED,
        )
        with self._lock:
            self._calls.setdefault(trajectory, []).append(RecordedCall(call, measured, llm_name))
        mark = {"trajectory_id": trajectory, "call_id": call_id, "step": 0}
        choices = [{**choice, "offbook": mark | {"index": choice["index"]}} for choice in answer.choices]
        completion = head(WHOLE, call_id, int(began), str(request["model"])) | {"choices": choices}
        return completion if answer.tokens is None else completion | {"usage": usage(*answer.tokens)}


def _sampling(request: dict[str, Json]) -> Sampling:
    """The sampling settings of a request, as far as OpenAI's API has them."""
    given = {name: request[name] for name in ("temperature", "top_p") if isinstance(request.get(name), int | float)}
    return Sampling.model_validate(given)


def _output(choice: Json) -> CallOutput:
    status = CallStatus.TRUNCATED if choice["finish_reason"] == CUT_OFF else CallStatus.COMPLETE
    message: Message = {name: value for name, value in choice["message"].items() if name != "role"}
    return CallOutput(
        index=choice["index"],
        token_ids=(),
        logprobs=(),
        message=message,
        finish_reason=choice["finish_reason"],
        status=status,
    )


def _error(message: str, code: str) -> Json:
    return error_body(message, code, code=code)


async def _cancel_others() -> None:
    own = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not own]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _Server(ThreadingHTTPServer):
    """A threaded server for many concurrent rollouts."""

    request_queue_size = 1024  # all rollouts begin at once; a full queue resets connections
    daemon_threads = True
    block_on_close = False


class _Handler(BaseHTTPRequestHandler):
    """Handles the HTTP requests of one connection."""

    protocol_version = "HTTP/1.1"
    gateway: Gateway

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the app closed the connection, or its rollout timed out
            self.close_connection = True

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = PATH.fullmatch(self.path.partition("?")[0])
        if path is None:
            return self._send(404, _error(f"no such path: {self.path}", "not_found"))
        if not self.gateway.authorised(self.headers.get("authorization")):
            return self._send(401, _error("this endpoint answers the app that is compared", "authentication"))
        try:
            body: Any = json.loads(content)
        except ValueError as error:
            return self._send(400, _error(f"the body is not JSON: {error}", "invalid_request_error"))
        trajectory = path["trajectory"] or self.headers.get(TRAJECTORY_HEADER) or new_id(OPEN)
        status, answer = self.gateway.answer(body, trajectory)
        if status == 200 and body.get("stream"):
            stream = events(chunks_of(answer, with_usage=wants_usage(body) and "usage" in answer))
            return self._write(200, b"".join(stream), EVENT_STREAM, answer["id"])
        return self._send(status, answer)

    def _send(self, status: int, body: Json) -> None:
        self._write(status, json.dumps(body).encode(), "application/json", body.get("id"))

    def _write(self, status: int, content: bytes, kind: str, call_id: str | None) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.send_header("x-should-retry", "false")  # the Llm has already retried
        if call_id is not None:
            self.send_header(CALL_HEADER, call_id)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the request log on stderr."""
