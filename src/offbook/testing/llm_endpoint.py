"""An OpenAI-compatible endpoint that answers by script, over real HTTP: what is tested includes the client's SDK. Its replies,
also those of a RULER judge: a score for each attempt in the judge's prompt."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import uuid4

from offbook.base.redaction import error_text
from offbook.base.server_sent_events import EVENT_STREAM
from offbook.base.types import Message, Tool
from offbook.openai_dialect import chat_answer
from offbook.openai_dialect.chat_answer import chunks_of, error_body, events, tool_call, wants_usage
from offbook.rewards.judge_prompt import SHARED
from offbook.rewards.transcripts import TOOLS

_OPENS = re.compile(r"\[([a-z0-9]{10}) (?:(shared beginning)|attempt (\w+)|sub-agent \d+ of attempt (\w+))\]")
Json = dict[str, Any]


@dataclass(frozen=True)
class LlmRequest:
    """One request as it arrived; header names in lower case. A chat completion's body is the JSON that the client sent.

    request.body["model"], request.messages[-1]["content"], request.headers["authorization"]"""

    path: str
    headers: dict[str, str]
    body: Any

    @property
    def messages(self) -> list[Json]:
        """The messages of a chat completion."""
        return self.body["messages"]


@dataclass(frozen=True)
class LlmReply:
    """What the endpoint does with one request. Make one with `says("...")`, `fails(503)` and the other functions.

    - `completion`: a chat completion, sent whole, or in chunks where the request asks for a stream. None: send `content`.
    - `seconds`: wait first. `until`: wait for this event first, 60 s at most.
    - `reset`: break the connection instead of answering."""

    content: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    seconds: float = 0.0
    reset: bool = False
    until: threading.Event | None = None
    completion: Json | None = None

    def body(self, request: LlmRequest) -> tuple[bytes, str]:
        """The bytes that answer a request, and their content type."""
        if self.completion is None:
            return self.content, "application/json"
        completion = {"id": f"chatcmpl-{uuid4().hex}", **self.completion}
        if not request.body.get("stream"):
            return json.dumps(completion).encode(), "application/json"
        chunks = chunks_of(completion, in_halves, with_usage=wants_usage(request.body))
        return b"".join(events(chunks)), EVENT_STREAM


Script = Sequence[LlmReply] | Callable[[LlmRequest], LlmReply]
"""Replies in the order of requests, the last of them for all that follow; or a function, called in the request's thread."""


def says(
    text: str | None,
    *,
    finish_reason: str = "stop",
    usage: tuple[int, int] | None = (10, 5),
    model: str = "scripted",
    seconds: float = 0.0,
    until: threading.Event | None = None,
    **message: Any,
) -> LlmReply:
    """A completion with this text.

        says('{"score": 0.7}', usage=(1_000, 20))

    `usage`: prompt and completion tokens; None: the reply does not tell. `message`: more fields of the message, such as
    `reasoning_content="..."`. `seconds`, `until`: as of `LlmReply`."""
    choice = {
        "index": 0,
        "finish_reason": finish_reason,
        "message": {"role": "assistant", "content": text, **message},
    }
    return _completion([choice], usage, model, seconds, until)


def calls_tool(
    name: str, arguments: str | Mapping[str, Any], *, call_id: str | None = None, **options: Any
) -> LlmReply:
    """A completion with one tool call.

        calls_tool("look_up", {"box": 7})

    `arguments`: a mapping, or raw text that is sent as it is. `call_id`: None makes a new one. `options`: those of `says`."""
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = tool_call(call_id or f"call-{uuid4().hex[:8]}", name, raw)
    return says(None, finish_reason="tool_calls", tool_calls=[call], **options)


def cuts(text: str) -> LlmReply:
    """A completion that reached its token limit: `finish_reason` is `length`. `cuts('{"score": 0.')`"""
    return says(text, finish_reason="length")


def refuses(reason: str) -> LlmReply:
    """A refusal as OpenAI sends it: no content, `finish_reason` is `stop`. `refuses("I cannot judge this.")`"""
    return says(None, refusal=reason)


def filters() -> LlmReply:
    """A completion that the content filter withheld: `finish_reason` is `content_filter`. `scripted_llm([filters()])`"""
    return says(None, finish_reason="content_filter")


def chooses_nothing() -> LlmReply:
    """A completion without choices. `scripted_llm([chooses_nothing(), says("7")])`"""
    return _completion([], (10, 0), "scripted", 0.0, None)


def fails(
    status: int, message: str = "scripted failure", *, code: str | None = None, headers: Mapping[str, str] | None = None
) -> LlmReply:
    """An error as OpenAI sends it. `fails(429, headers={"retry-after": "1"})`"""
    error = error_body(message, code or "scripted", code=code)
    return LlmReply(json.dumps(error).encode(), status, dict(headers or {}))


def sends(text: str, *, status: int = 200, headers: Mapping[str, str] | None = None) -> LlmReply:
    """A body as it is, such as a proxy's page. `sends("<html>Bad gateway</html>", status=502)`"""
    return LlmReply(text.encode(), status, {"content-type": "text/html", **(headers or {})})


def hangs(seconds: float = 60.0) -> LlmReply:
    """No reply for so long; the end of the endpoint's block ends the wait. `scripted_llm([hangs(), says("7")])`"""
    return LlmReply(b"{}", seconds=seconds)


def resets() -> LlmReply:
    """A connection that breaks. `scripted_llm([resets(), says("7")])`"""
    return LlmReply(reset=True)


def in_halves(message: Json) -> Iterator[Json]:
    """A message as deltas: texts and the arguments of tool calls in two halves."""
    yield {"role": "assistant", "content": ""}
    for name, value in message.items():
        if name not in ("role", "tool_calls") and isinstance(value, str):
            yield from ({name: half} for half in _halves(value) if half)
    for index, call in enumerate(message.get("tool_calls") or []):
        function = call["function"]
        first, second = _halves(function["arguments"])
        yield {"tool_calls": [{**call, "index": index, "function": {**function, "arguments": first}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": second}}]}


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


def _completion(
    choices: list[Json], usage: tuple[int, int] | None, model: str, seconds: float, until: threading.Event | None
) -> LlmReply:
    completion: Json = {"object": chat_answer.WHOLE, "created": 0, "model": model, "choices": choices}
    if usage is not None:
        completion["usage"] = chat_answer.usage(*usage)
    return LlmReply(seconds=seconds, until=until, completion=completion)


@dataclass
class ShownConversation:
    """A conversation as it stands in a judge's prompt. `tools`: None where the prompt names none.

    conversation.messages[-1]["content"]  # the attempt's answer
    """

    messages: list[Message] = field(default_factory=list[Message])
    tools: list[Tool] | None = None


def attempts_shown(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[ShownConversation]]:
    """The attempts of a judge's prompt by id, in the order shown: each one's own conversation, whole, then its sub-agents'.

    attempts_shown(endpoint.requests[0].messages)

    {} for a prompt that is none of RULER's."""
    shared: list[str] = []
    attempts: dict[str, list[ShownConversation]] = {}
    prompt = str(messages[1]["content"]) if len(messages) > 1 else ""
    lines = iter(prompt.split("\n"))
    for line in lines:
        opened = _OPENS.fullmatch(line)
        if opened is None:
            continue
        mark, begins, own, owner = opened.groups()
        inside: list[str] = []
        while (line := next(lines)) != f"[{mark} end]":
            inside.append(line)
        if begins == SHARED:
            shared = inside
        else:
            attempts.setdefault(own or owner, []).append(_conversation(shared + inside if own else inside))
    return attempts


def judges(
    request: LlmRequest, score: Callable[[list[ShownConversation]], float], *, explanation: str = "scripted"
) -> LlmReply:
    """The reply of a RULER judge: a score for each attempt that the request shows, under the ids that it was shown with.

        def short(conversations):
            return 1.0 if len(conversations[0].messages[-1]["content"]) < 80 else 0.2

        with scripted_llm(lambda request: judges(request, short)) as endpoint:
            judge = offbook.Ruler("openai/judge", api_base=endpoint.url, api_key="unused", cache=None)

    `score`: from an attempt's conversations, as of `attempts_shown`, to a number from 0 to 1. `explanation`: of each score.
    Raises ValueError for a request that is no prompt of RULER's."""
    attempts = attempts_shown(request.messages)
    if not attempts:
        raise ValueError(f"the request shows no attempts, so it is no prompt of RULER's: {request.messages!r}")
    scores = [{"id": id, "explanation": explanation, "score": score(attempt)} for id, attempt in attempts.items()]
    return says(json.dumps({"scores": scores}))


def _conversation(lines: Sequence[str]) -> ShownConversation:
    shown = ShownConversation()
    for line in lines:
        if line.startswith(TOOLS):
            shown.tools = json.loads(line.removeprefix(TOOLS))
        else:
            shown.messages.append(json.loads(line))
    return shown


class ScriptedLlm:
    """A running endpoint, as `scripted_llm` yields it.

        assert endpoint.requests[0].messages[-1]["content"] == "Where is box 4821?"

    - `url`: for `api_base=` or `base_url=`; it ends in `/v1`.
    - `requests`: what arrived, in order.
    - `max_concurrency`: the largest number of requests that were in progress at the same time.
    - `failures`: what the script raised. The client gets status 500 with the error's text."""

    def __init__(self, script: Script) -> None:
        if not callable(script) and not script:
            raise ValueError("script is empty: give at least one reply, such as says('...')")
        self.url = ""
        self.requests: list[LlmRequest] = []
        self.failures: list[Exception] = []
        self.max_concurrency = 0
        self.closing = threading.Event()
        self._script = script
        self._at_once = 0
        self._lock = threading.Lock()

    def reply(self, request: LlmRequest) -> LlmReply:
        """The script's reply to the next request."""
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
        if not callable(self._script):
            return self._script[min(number, len(self._script) - 1)]
        try:
            return self._script(request)
        except Exception as error:  # noqa: BLE001  # the script is the user's code: `scripted_llm` raises it at the end
            self.failures.append(error)
            return fails(500, f"the script raised {error_text(error)}")

    @contextmanager
    def counted(self) -> Generator[None]:
        """Count a request that is in progress."""
        with self._lock:
            self._at_once += 1
            self.max_concurrency = max(self.max_concurrency, self._at_once)
        try:
            yield
        finally:
            with self._lock:
                self._at_once -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    endpoint: ScriptedLlm

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the client gave up
            self.close_connection = True

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"null")
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = LlmRequest(self.path, headers, body)
        with self.endpoint.counted():
            reply = self.endpoint.reply(request)
            self.endpoint.closing.wait(reply.seconds)
            if reply.until is not None:
                reply.until.wait(60)
        if reply.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        content, content_type = reply.body(request)
        self.send_response(reply.status)
        for name, value in {"content-type": content_type, **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


@contextmanager
def scripted_llm(script: Script) -> Generator[ScriptedLlm]:
    """Serve a script on a free port of loopback until the block ends.

        with scripted_llm([fails(429, headers={"retry-after": "1"}), says('{"score": 1}')]) as endpoint:
            judge = Llm("openai/judge", api_base=endpoint.url, cache=None)

        with scripted_llm(lambda request: says(request.messages[-1]["content"].upper())) as endpoint:
            client = AsyncOpenAI(base_url=endpoint.url, api_key="unused")

    `script`: replies in the order of requests, the last of them for all that follow; or a function from a request to its
    reply, called in the request's thread. Every path is answered. An empty script is a ValueError.

    When the block ends well, raises the first error that the function raised."""
    endpoint = ScriptedLlm(script)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"endpoint": endpoint}))
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
    if endpoint.failures:
        raise endpoint.failures[0]
