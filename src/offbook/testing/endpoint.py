"""An OpenAI-compatible endpoint that answers by script, over real HTTP: what is tested includes the client's SDK."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from offbook.base.redaction import error_text

from .replies import LlmReply, LlmRequest, Script, fails


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
