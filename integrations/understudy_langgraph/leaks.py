"""The leak check: a request to another LLM that leaves during a capture, past it, is named with the line that made it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, cast

from langchain_core.language_models import BaseChatModel

from understudy.integration import LeakError, is_labelled, is_outside

from .active_capture import ActiveCapture, active

log = logging.getLogger("understudy")

LLM_PATH = re.compile(
    r"/chat/completions$|:(stream)?generateContent$|/converse(-stream)?$|/model/[^/]+/invoke|/api/(chat|generate)$",
    re.I,
)
"""Paths that nothing but an LLM has."""
NO_LLM_PATH = re.compile(
    r"/(embeddings|embed|moderations|rerank|classify|pooling|tokenize|count_tokens|videos|files|batches)$"
    r"|/(audio|images)/\w+$|/model/[^/]*(embed|rerank|image)[^/]*/invoke",
    re.I,
)
"""Paths of models that are no LLMs."""
ASKS = ("messages", "input", "prompt", "contents")
"""Beside `model`, one of these keys makes a JSON body a request to an LLM, whatever its path."""
LIBRARY_FOLDERS = tuple(
    os.path.realpath(path) + os.sep
    for path in {
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        os.path.dirname(__file__),
    }
)

_watched: set[str] = set()


def watch() -> None:
    """Look at what leaves through the HTTP libraries that are installed: httpx, httpx2, urllib3 (requests, boto3) and
    aiohttp, once each. aiohttp is slow to import, and watched once somebody has."""
    for name, install in (("httpx", _watch_httpx), ("httpx2", _watch_httpx), ("urllib3", _watch_urllib3)):
        if name not in _watched and importlib.util.find_spec(name) is not None:
            _watched.add(name)
            install(importlib.import_module(name))
    if "aiohttp" in sys.modules and "aiohttp" not in _watched:
        _watched.add("aiohttp")
        _watch_aiohttp(sys.modules["aiohttp"])


def check(method: str, url: str, headers: Mapping[str, Any] | None, body: Callable[[], object]) -> None:
    """Act on a request that is about to leave, if it leaks. Raises LeakError where the capture says so."""
    capture = active()
    if is_outside() or capture is None or capture.ended or capture.on_leak == "ignore" or method.upper() != "POST":
        return
    if is_labelled(url, [str(name) for name in headers or ()]):
        return
    if asks_an_llm(url, body):
        place = _calling_line()
        if place is not None:
            _report(capture, url, place)


def asks_an_llm(url: str, body: Callable[[], object]) -> bool:
    """Whether path or JSON body are those of a request to an LLM."""
    path = url.split("?")[0].rstrip("/")
    if NO_LLM_PATH.search(path):
        return False
    if LLM_PATH.search(path):
        return True
    found = body()
    if isinstance(found, bytes | bytearray | str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return False
    if not isinstance(found, Mapping):
        return False
    fields = cast(Mapping[str, object], found)
    return isinstance(fields.get("model"), str) and any(_is_text(fields.get(key)) for key in ASKS)


def _is_text(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(isinstance(each, Mapping) for each in value))  # pyright: ignore[reportUnknownVariableType]


def _report(capture: ActiveCapture, url: str, place: str) -> None:
    where = url.split("?")[0]  # a query may hold a key
    said = (
        f"a request to another LLM left the capture: POST {where}, made at {place}. It was not redirected and trains "
        "nothing: call the model through a LangChain chat model or model.openai_client(), put a judge or a simulated "
        'user under `with uncaptured():`, or accept it with on_leak="warn" or "ignore"'
    )
    if capture.on_leak == "warn":
        if capture.trajectory is None or said not in capture.trajectory.logs:
            log.warning(said)
        if capture.trajectory is not None:
            capture.trajectory.log(said)
        return
    error = LeakError(said)
    capture.faults.append(error)
    raise error


def _calling_line() -> str | None:
    """The innermost line outside of libraries; None for a request of a chat model, whose entry point has decided."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # a traceback would cost more
    line = None
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",) and isinstance(frame.f_locals.get("self"), BaseChatModel):
            return None
        if line is None and not _of_a_library(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return line or "(no line of the app's own is on the stack)"


@functools.cache
def _of_a_library(file: str) -> bool:
    return file.startswith("<") or os.path.realpath(file).startswith(LIBRARY_FOLDERS)


def _watch_httpx(module: Any) -> None:
    """At the transport: our own clients have labelled their requests by then."""
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
