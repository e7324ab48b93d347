"""HTTP client of the server's training API: one typed method per request, failures as errors of this package; and the connection pools,
which live as long as the event loop that uses them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any, Literal, TypeVar, cast
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from offbook.base.clock import Backoff
from offbook.base.config import Name
from offbook.base.errors import ConfigError, ServerError, UnreachableError
from offbook.base.types import Json
from offbook.base.wire import (
    FINISHED_AT_ONCE,
    AdoptRequest,
    ArchiveRequest,
    ArchiveState,
    CheckpointState,
    ExportRequest,
    ExportResult,
    FinishRequest,
    FinishResult,
    ForkRequest,
    Health,
    LogRequest,
    ModelState,
    RegisterRequest,
    RunEnd,
    TracePage,
    TrainStatus,
    TrajectoryPage,
    TrajectoryQuery,
    TrajectoryRecord,
    TrajectoryWithCalls,
    UserState,
)

POOLS = 8
"""Connection pools per event loop, used in turn. httpcore scans all connections of a pool at every request; with one pool,
that took two fifths of the time of 200 concurrent rollouts."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=30)


@dataclass(frozen=True)
class _LoopPools:
    """The pools of one event loop in rotation, and the generator that closes them when the loop shuts down."""

    rotation: Iterator[httpx.AsyncHTTPTransport]
    closer: AsyncGenerator[None]


_lock = threading.Lock()
_pools: dict[tuple[asyncio.AbstractEventLoop, bool], _LoopPools] = {}
"""Pools by running event loop and TLS. All clients of a loop share them: the connections of a garbage-collected client
could not be closed any more."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # a child on its parent's connections would mix up responses


class LoopTransport(httpx.AsyncBaseTransport):
    """A transport over the connection pools of the running event loop, which are closed when that loop shuts down.

    A client built on it works in several loops, one after the other or at once (a notebook's loop and `asyncio.run` in a
    thread), where a plain one fails with "Event loop is closed". Closing it closes no connection, since other clients of
    the loop share them.
    """

    def __init__(self, *, secure: bool) -> None:
        # `secure=False` skips loading the certificates, which takes longer than the first request.
        self._secure = secure

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send over the connections of the running event loop."""
        loop_pools = _pools.get((asyncio.get_running_loop(), self._secure)) or await _open(self._secure)
        return await next(loop_pools.rotation).handle_async_request(request)


async def _open(secure: bool) -> _LoopPools:
    loop = asyncio.get_running_loop()
    verify = httpx.create_ssl_context() if secure else False
    pools = tuple(httpx.AsyncHTTPTransport(verify=verify, limits=LIMITS) for _ in range(POOLS))
    loop_pools = _LoopPools(itertools.cycle(pools), _close_with_loop(pools))
    with _lock:
        for closed in [key for key in _pools if key[0].is_closed()]:
            del _pools[closed]
        _pools[loop, secure] = loop_pools
    # The first `anext` registers the generator with the loop, which closes it in `shutdown_asyncgens` (`asyncio.run` does).
    await anext(loop_pools.closer)
    return loop_pools


async def _close_with_loop(pools: Sequence[httpx.AsyncHTTPTransport]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        for pool in pools:
            await pool.aclose()


logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
BATCH_BYTES = 4 * 2**20
"""Approximate size of a request body with finished trajectories, well below the server's limit."""
TIMEOUT_SECONDS = 120.0
"""Longest silence in a response."""
ADAPTER_SECONDS = 3600.0
"""The same, while the server may load a base to compare an adapter with."""
CONNECT_SECONDS = 30.0
RETRY_SECONDS = 20.0
"""How long an idempotent request is repeated while nothing answers: the server may be restarting."""
FIRST_SECONDS = 4.0
"""Replaces both limits above for a server that has never answered: its URL may be wrong."""

_NAME: TypeAdapter[str] = TypeAdapter(Name)


class Api:
    """A client of one server, usable from any event loop.

    Every request method raises ServerError when the server rejects the request, and UnreachableError when nothing answers.
    `alive` is called before a request is repeated, and raises if the server has ended for good.
    """

    def __init__(self, url: str, key: str | None = None, *, alive: Callable[[], None] | None = None) -> None:
        self.url = checked_url(url)
        self.key = key or None
        self.transport = LoopTransport(secure=self.url.startswith("https"))
        self.alive = alive or (lambda: None)
        self.answered = False  # whether any request got a response
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=TIMEOUT_SECONDS, transport=self.transport
        )

    @property
    def connect_seconds(self) -> float:
        """Connect timeout in seconds; short until the server has answered once."""
        return CONNECT_SECONDS if self.answered else FIRST_SECONDS

    async def health(self) -> Health:
        """The server's state and versions."""
        return await self.ask(Health, "GET", "/health")

    async def register(self, request: RegisterRequest) -> ModelState:
        """Create a trainable model, or return the existing one of the same name and base.

        A folder may hold an adapter, which the server compares with its base first: it loads the base for it.
        """
        seconds = ADAPTER_SECONDS if PurePath(request.base_model).is_absolute() else None
        return await self.ask(ModelState, "POST", "/api/models", request, timeout=seconds)

    async def models(self) -> list[ModelState]:
        """Every registered model."""
        return await self.ask(list[ModelState], "GET", "/api/models")

    async def model(self, name: str) -> ModelState:
        """One registered model, with its newest step."""
        return await self.ask(ModelState, "GET", _path(name))

    async def fork(self, name: str, request: ForkRequest) -> ModelState:
        """Create a model that starts from a step of this one."""
        return await self.ask(ModelState, "POST", f"{_path(name)}/fork", request, repeat=False)

    async def adopt(self, name: str, request: AdoptRequest) -> ModelState:
        """Make a step of another model the newest step of this one."""
        return await self.ask(ModelState, "POST", f"{_path(name)}/adopt", request)

    async def log(self, name: str, request: LogRequest) -> None:
        """Store metrics with the model. A request with an `id` is sent again while nothing answers."""
        await self._send("POST", f"{_path(name)}/log", request, repeat=request.id is not None)

    async def logs(self, name: str) -> list[LogRequest]:
        """Everything logged with the model, oldest first."""
        return await self.ask(list[LogRequest], "GET", f"{_path(name)}/log")

    async def end_run(self, run: str) -> None:
        """Tell the server that a run is over."""
        await self._send("POST", "/api/runs/ended", RunEnd(run=run))

    async def state(self, name: str) -> dict[str, Json]:
        """The user's JSON object stored with the model."""
        return (await self.ask(UserState, "GET", f"{_path(name)}/state")).value

    async def set_state(self, name: str, value: dict[str, Json]) -> None:
        """Replace the user's JSON object stored with the model."""
        await self._send("PUT", f"{_path(name)}/state", UserState(value=value))

    async def checkpoints(self, name: str) -> list[CheckpointState]:
        """The checkpoints that exist, by step."""
        checkpoints = await self.ask(list[CheckpointState], "GET", f"{_path(name)}/checkpoints")
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)

    async def delete_checkpoint(self, name: str, step: int) -> None:
        """Delete one checkpoint. Raises ServerError for the newest."""
        await self._send("DELETE", f"{_path(name)}/checkpoints/{step}", repeat=False)

    async def export(self, name: str, step: int, request: ExportRequest) -> ExportResult:
        """Export a checkpoint to a folder on the server's machine; may take up to an hour."""
        path = f"{_path(name)}/checkpoints/{step}/export"
        return await self.ask(ExportResult, "POST", path, request, repeat=False, timeout=3600)

    async def archive(self, name: str, step: int, request: ArchiveRequest) -> ArchiveState:
        """Create a downloadable archive of an export, or return the existing one; may take up to an hour."""
        path = f"{_path(name)}/checkpoints/{step}/archive"
        return await self.ask(ArchiveState, "POST", path, request, timeout=3600)

    async def delete_archive(self, archive_id: str) -> None:
        """Remove an archive from the server's disk."""
        await self._send("DELETE", archive_path(archive_id), repeat=False)

    async def finish(self, records: Sequence[TrajectoryRecord]) -> dict[str, int]:
        """Finish trajectories, in batches below the server's body limit; returns the recorded calls per trajectory id."""
        calls: dict[str, int] = {}
        for batch in _batches(records):
            result = await self.ask(FinishResult, "POST", "/api/trajectories", FinishRequest(trajectories=tuple(batch)))
            calls.update(result.calls)
            for trajectory_id, count in result.expired.items():
                logger.warning(
                    "%d calls of trajectory %s expired before it was finished, and are not trained: raise the server's "
                    "--unclaimed-ttl",
                    count,
                    trajectory_id,
                )
        return calls

    async def train_status(self, request_id: str) -> TrainStatus | None:
        """The state of a train request; None if the server does not know it."""
        try:
            return await self.ask(TrainStatus, "GET", f"/api/train/{request_id}")
        except ServerError as error:
            if error.status != 404:
                raise
            return None

    async def trajectories(self, query: TrajectoryQuery) -> TrajectoryPage:
        """A page of the finished trajectories that match; pass `after=page.next` for the next page."""
        parameters = httpx.QueryParams(query.model_dump(exclude_none=True))
        return await self.ask(TrajectoryPage, "GET", f"/api/trajectories?{parameters}")

    async def traces(self, query: TrajectoryQuery) -> TracePage:
        """Like `trajectories`, with the calls of every trajectory but without their token arrays."""
        parameters = httpx.QueryParams(query.model_dump(exclude_none=True))
        return await self.ask(TracePage, "GET", f"/api/traces?{parameters}")

    async def trajectory(self, trajectory_id: str) -> TrajectoryWithCalls:
        """A trajectory and the calls recorded under it."""
        return await self.ask(TrajectoryWithCalls, "GET", f"/api/trajectories/{trajectory_id}")

    async def ask(
        self,
        kind: type[Answer],
        method: Literal["GET", "POST", "PUT", "DELETE"],
        path: str,
        body: BaseModel | None = None,
        *,
        repeat: bool = True,
        timeout: float | None = None,
    ) -> Answer:
        """Send a request and return the response as `kind`. Raises UnreachableError, ServerError."""
        response = await self._send(method, path, body, repeat=repeat, timeout=timeout)
        reader = _reader(kind)
        try:
            return cast(Answer, reader.validate_json(response.content))  # half the time of parsing first
        except ValidationError:
            value = self._json(path, response)  # Python also parses what pydantic does not, such as lone surrogates
        try:
            return cast(Answer, reader.validate_python(value))
        except ValidationError as error:
            raise ServerError(
                f"{self.url} answered with values that this version does not know: {error!s:.500}; install the same version on "
                "both sides"
            ) from error

    def _json(self, path: str, response: httpx.Response) -> Json:
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise ServerError(
                f"{self.url} answered {path} with something that is not JSON: {response.text[:200]!r}; "
                "is this the URL of an Offbook server?"
            ) from error

    async def _send(
        self,
        method: Literal["GET", "POST", "PUT", "DELETE"],
        path: str,
        body: BaseModel | None = None,
        *,
        repeat: bool = True,
        timeout: float | None = None,
    ) -> httpx.Response:
        """Send a request. With `repeat`, send it again while nothing answers. Raises UnreachableError, ServerError."""
        content = body.model_dump_json().encode() if body is not None else None
        headers = {"content-type": "application/json"} if content else {}
        backoff = Backoff(RETRY_SECONDS if self.answered else FIRST_SECONDS)
        while True:
            wait = httpx.Timeout(
                timeout or TIMEOUT_SECONDS,
                connect=max(min(self.connect_seconds, backoff.deadline - time.monotonic()), 0.5),
            )
            try:
                answer = await self.http.request(method, path, content=content, headers=headers, timeout=wait)
                self.answered = True
            except httpx.TransportError as error:
                self.alive()
                if not repeat or not await backoff.wait():
                    raise unreachable(self.url, error) from error
                continue
            if not answer.is_success:
                raise server_error(self.url, answer)
            return answer


@cache
def _reader(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked_url(url: str) -> str:
    """Return the server's root URL, without a trailing `/v1`. Raises ConfigError if it is not an HTTP URL."""
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigError(f"url: {url!r} is not a URL; expected one such as 'http://127.0.0.1:8000'") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"url: {url!r} must begin with http:// or https://, such as 'http://127.0.0.1:8000'")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def unreachable(url: str, error: httpx.TransportError) -> UnreachableError:
    """Build the error for a server that did not answer, with the URL and the cause."""
    cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return UnreachableError(f"no answer from the server at {url} ({cause}): is it running, and is the URL right?")


def server_error(url: str, answer: httpx.Response) -> ServerError:
    """Build the error for a response that is not 2xx: the server's message, status, code and field."""
    message, code, param = answer.text[:2000] or answer.reason_phrase, "server_error", None
    try:
        fault: Json = answer.json()["error"]
        message, code, param = str(fault["message"]), str(fault.get("code") or code), fault.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        message = f"{url} answered {answer.status_code}, not in the shape of an Offbook server: {message!r}"
    if answer.has_redirect_location:
        message = f"{url} redirects to {answer.headers['location']}: give the server's own URL"
    if answer.status_code == 401:
        message += " (pass api_key=, or set OFFBOOK_API_KEY)"
    return ServerError(message, status=answer.status_code, code=code, param=param)


def archive_path(archive_id: str) -> str:
    """URL path of an archive's download."""
    return f"/api/exports/{quote(archive_id)}"


def _path(name: str) -> str:
    return f"/api/models/{checked_name(name, 'name')}"


def checked_name(name: str, field: str) -> str:
    """Return the name if it is safe as a folder name. Raises ConfigError naming `field`."""
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        raise ConfigError(
            f"{field}: {name!r} must be letters, digits, dots, dashes and underscores, at most 128, beginning with a letter or digit"
        ) from error


def _batches(records: Sequence[TrajectoryRecord]) -> list[list[TrajectoryRecord]]:
    batches: list[list[TrajectoryRecord]] = []
    bytes_left = 0
    for record in records:
        size = len(record.model_dump_json())
        if not batches or size > bytes_left or len(batches[-1]) >= FINISHED_AT_ONCE:
            batches.append([])
            bytes_left = BATCH_BYTES
        batches[-1].append(record)
        bytes_left -= size
    return batches
