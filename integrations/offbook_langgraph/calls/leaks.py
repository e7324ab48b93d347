"""The leak check: finds HTTP requests to other LLMs that bypass an active capture, and names the line that made them."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, cast

from langchain_core.language_models import BaseChatModel

from offbook.base.app_files import is_app_file
from offbook.base.errors import LeakError
from offbook.base.wire import is_labelled
from offbook.client.rollouts.capture import is_outside

from .active_capture import ActiveCapture, active

logger = logging.getLogger("offbook")

LLM_PATH = re.compile(
    r"/chat/completions$|:(stream)?generateContent$|/converse(-stream)?$|/model/[^/]+/invoke|/api/(chat|generate)$",
    re.I,
)
"""URL paths that only LLM APIs use."""
NO_LLM_PATH = re.compile(
    r"/(embeddings|embed|moderations|rerank|classify|pooling|tokenize|count_tokens|videos|files|batches)$"
    r"|/(audio|images)/\w+$|/model/[^/]*(embed|rerank|image)[^/]*/invoke",
    re.I,
)
"""URL paths of other models and of file APIs."""
PROMPT_KEYS = ("messages", "input", "prompt", "contents")
"""A JSON body with `model` and one of these keys is a request to an LLM, whatever its path."""
OUR_SERVER = "offbook.server."
"""Begins the names of our server's modules. Its requests to its sampler are seen when it runs in this process."""

_watched: set[str] = set()


def watch() -> None:
    """Patch the installed HTTP libraries, once: httpx, httpx2, urllib3 (used by requests and boto3) and aiohttp.

    aiohttp is slow to import, so it is patched only after the app has imported it.
    """
    for name, install in (("httpx", _watch_httpx), ("httpx2", _watch_httpx), ("urllib3", _watch_urllib3)):
        if name not in _watched and importlib.util.find_spec(name) is not None:
            _watched.add(name)
            install(importlib.import_module(name))
    if "aiohttp" in sys.modules and "aiohttp" not in _watched:
        _watched.add("aiohttp")
        _watch_aiohttp(sys.modules["aiohttp"])


def check(method: str, url: str, headers: Mapping[str, Any] | None, body: Callable[[], object]) -> None:
    """Check a request before it is sent. A leak is warned about, or raises LeakError, as the capture's `on_leak` says."""
    capture = active()
    if is_outside() or capture is None or capture.ended or capture.on_leak == "ignore" or method.upper() != "POST":
        return
    if is_labelled(url, [str(name) for name in headers or ()]):
        return
    if is_llm_request(url, body):
        line = _calling_line()
        if line is not None:
            _report(capture, url, line)


def is_llm_request(url: str, body: Callable[[], object]) -> bool:
    """Whether the path or the JSON body is that of a request to an LLM."""
    path = url.split("?")[0].rstrip("/")
    if NO_LLM_PATH.search(path):
        return False
    if LLM_PATH.search(path):
        return True
    content = body()
    if isinstance(content, bytes | bytearray | str):
        try:
            content = json.loads(content)
        except (ValueError, RecursionError):
            return False
    if not isinstance(content, Mapping):
        return False
    fields = cast(Mapping[str, object], content)
    return isinstance(fields.get("model"), str) and any(_is_text(fields.get(key)) for key in PROMPT_KEYS)


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(isinstance(item, Mapping) for item in value))  # pyright: ignore[reportUnknownVariableType]


def _report(capture: ActiveCapture, url: str, line: str) -> None:
    shown_url = url.split("?")[0]  # a query may contain a key
    message = (
        f"a request to another LLM left the capture: POST {shown_url}, made at {line}. It was not redirected and trains "
        "nothing: call the model through a LangChain chat model or model.openai_client(), put a judge or a simulated "
        'user under `with uncaptured():`, or accept it with on_leak="warn" or "ignore"'
    )
    if capture.on_leak == "warn":
        if capture.trajectory is None or message not in capture.trajectory.logs:
            logger.warning(message)
        if capture.trajectory is not None:
            capture.trajectory.log(message)
        return
    error = LeakError(message)
    capture.faults.append(error)
    raise error


def _calling_line() -> str | None:
    """The innermost line of the app on the call stack.

    None inside a LangChain chat model, whose patched entry point has already decided where the call goes, and inside our
    own server.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # cheaper than a traceback
    line = None
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(frame.f_locals.get("self"), BaseChatModel):
            return None
        if frame.f_globals.get("__name__", "").startswith(OUR_SERVER):
            return None
        if line is None and is_app_file(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return line or "(no line of the app's own is on the stack)"


def _watch_httpx(module: Any) -> None:
    """Patch the transports of httpx: by then our own clients have labelled their requests."""
    sync, of_async = module.HTTPTransport, module.AsyncHTTPTransport
    handle, handle_async = sync.handle_request, of_async.handle_async_request

    @functools.wraps(handle)
    def handle_request(self: Any, request: Any) -> Any:
        check(request.method, str(request.url), request.headers, lambda: getattr(request, "_content", b""))
        return handle(self, request)

    @functools.wraps(handle_async)
    async def handle_async_request(self: Any, request: Any) -> Any:
        check(request.method, str(request.url), request.headers, lambda: getattr(request, "_content", b""))
        return await handle_async(self, request)

    sync.handle_request, of_async.handle_async_request = handle_request, handle_async_request


def _watch_urllib3(module: Any) -> None:
    pool = module.HTTPConnectionPool
    urlopen = pool.urlopen

    @functools.wraps(urlopen)
    def checked(
        self: Any, method: str, url: str, body: Any = None, headers: Any = None, *rest: Any, **options: Any
    ) -> Any:
        check(method, f"{self.scheme}://{self.host}:{self.port}{url}", headers, lambda: body)
        return urlopen(self, method, url, body, headers, *rest, **options)

    pool.urlopen = checked


def _watch_aiohttp(module: Any) -> None:
    session = module.ClientSession
    request = session._request

    @functools.wraps(request)
    async def checked(self: Any, method: str, str_or_url: Any, **options: Any) -> Any:
        body = options.get("json") if options.get("json") is not None else options.get("data")
        check(method, str(str_or_url), options.get("headers"), lambda: body)
        return await request(self, method, str_or_url, **options)

    session._request = checked
