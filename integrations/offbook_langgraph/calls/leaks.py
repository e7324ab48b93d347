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

from offbook.base.errors import LeakError
from offbook.base.wire import is_labelled
from offbook.client.rollouts.capture import is_outside

from .active_capture import ActiveCapture, active
from .own_code import own_run
from .run_tree import UNKNOWN_LINE

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

_WATCHED = "__offbook_watched__"


def watch() -> None:
    """Patch the installed HTTP libraries: httpx, httpx2, urllib3 (used by requests and boto3) and aiohttp.

    aiohttp is slow to import, so it is patched only after the app has imported it. A recorder such as vcr takes our patch away
    if it was there before us, so each capture looks anew.
    """
    for module in filter(None, map(_installed, ("httpx", "httpx2"))):
        _wrap(module.HTTPTransport, "handle_request", _checked_httpx)
        _wrap(module.AsyncHTTPTransport, "handle_async_request", _checked_httpx_async)
    if (module := _installed("urllib3")) is not None:
        _wrap(module.HTTPConnectionPool, "urlopen", _checked_urllib3)
    if (module := cast(Any, sys.modules.get("aiohttp"))) is not None:
        _wrap(module.ClientSession, "_request", _checked_aiohttp)


@functools.cache
def _installed(name: str) -> Any:
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


def _wrap(owner: type[Any], name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    method = getattr(owner, name)
    if not hasattr(method, _WATCHED):
        checked = functools.wraps(method)(wrap(method))
        setattr(checked, _WATCHED, True)
        setattr(owner, name, checked)


def check(method: str, url: str, headers: Mapping[str, Any] | None, body: Callable[[], object]) -> None:
    """Check a request before it is sent. A leak is warned about, or raises LeakError, as the capture's `on_leak` says."""
    capture = active()
    if is_outside() or capture is None or capture.ended or capture.on_leak == "ignore" or method.upper() != "POST":
        return
    if is_labelled(url, [str(name) for name in headers or ()]):
        return
    if is_llm_request(url, body) and _is_apps_own():
        site = capture.site()
        if site.judge is None:
            _report(capture, url, site.line or UNKNOWN_LINE)


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
        'user under `with offbook.outside():`, or accept it with on_leak="warn" or "ignore"'
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


def _is_apps_own() -> bool:
    """Whether the app's code makes the request.

    A LangChain chat model's request was decided by its patched entry point, unless it comes from the app's own chat model
    class while its code runs for the trained model. Our own server's requests, and those of a judge, are no leaks.
    """
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # cheaper than a traceback
    run = own_run()
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_varnames[:1] == ("self",) else None
        if isinstance(owner, BaseChatModel):
            return run is not None and owner is run.model
        if frame.f_globals.get("__name__", "").startswith(OUR_SERVER):
            return False
        frame = frame.f_back
    return True


def _checked_httpx(handle: Callable[..., Any]) -> Callable[..., Any]:
    """The transports of httpx are patched, since by then our own clients have labelled their requests."""

    def handle_request(self: Any, request: Any) -> Any:
        check(request.method, str(request.url), request.headers, lambda: getattr(request, "_content", b""))
        return handle(self, request)

    return handle_request


def _checked_httpx_async(handle: Callable[..., Any]) -> Callable[..., Any]:
    async def handle_async_request(self: Any, request: Any) -> Any:
        check(request.method, str(request.url), request.headers, lambda: getattr(request, "_content", b""))
        return await handle(self, request)

    return handle_async_request


def _checked_urllib3(urlopen: Callable[..., Any]) -> Callable[..., Any]:
    def checked(
        self: Any, method: str, url: str, body: Any = None, headers: Any = None, *rest: Any, **options: Any
    ) -> Any:
        check(method, f"{self.scheme}://{self.host}:{self.port}{url}", headers, lambda: body)
        return urlopen(self, method, url, body, headers, *rest, **options)

    return checked


def _checked_aiohttp(request: Callable[..., Any]) -> Callable[..., Any]:
    async def checked(self: Any, method: str, str_or_url: Any, **options: Any) -> Any:
        body = options.get("json") if options.get("json") is not None else options.get("data")
        check(method, str(str_or_url), options.get("headers"), lambda: body)
        return await request(self, method, str_or_url, **options)

    return checked
