"""Backends: the server that samples and trains, as the user's process sees it, and a model's registration with it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, Self, TypeVar, cast

from offbook.base.config import Options, TrainConfig
from offbook.base.errors import ConfigError, TrainError
from offbook.base.option_names import names_checked
from offbook.base.types import TrainResult, TrajectoryGroup, new_id
from offbook.base.wire import RegisterRequest, TrainEvent, TrainRequest

from .connection.http import Api, checked_url
from .connection.progress import TrainBar
from .connection.train_stream import train
from .rollouts.failures import details, failure_kinds
from .rollouts.records import group_wires, require_calls

logger = logging.getLogger("offbook")


class BackendModel(Protocol):
    """The part of a model that a backend uses."""

    @property
    def name(self) -> str: ...

    async def register(self, backend: Backend) -> None: ...

    async def api(self) -> Api: ...


class Backend(ABC):
    """A server that samples and trains: `LocalBackend` starts one on this machine, `RemoteBackend` uses one elsewhere."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Raise ConfigError for `Backend(...)` itself: other trainers have a concrete class of this name."""
        if cls is Backend:
            raise ConfigError("Backend is an abstract base class: use RemoteBackend(url), or LocalBackend()")
        return super().__new__(cls)

    @abstractmethod
    async def connect(self, base_model: str | None = None) -> Api:
        """Return the running server. `base_model` is loaded if the server has to be started."""

    def path_on_server(self, path: str | os.PathLike[str]) -> str:
        """Convert a user's path to one for the server's machine. Unchanged by default: that may be another machine."""
        return os.fspath(path)

    def watched_at(self, run: str) -> str:
        """Return where a person sees the run: an address, or a command."""
        return f"{run} on {self!r}"

    async def register(self, model: BackendModel) -> None:
        """Register the model on the server. Idempotent; raises ServerError if the name exists with another base model."""
        await model.register(self)

    async def train(
        self,
        model: BackendModel,
        groups: Iterable[TrajectoryGroup] | None = None,
        config: TrainConfig | Mapping[str, object] | None = None,
        *,
        request_id: str | None = None,
        on_event: Callable[[TrainEvent], None] | None = None,
        pbar_desc: str | None = "train",
        timeout: float | None = None,
        **options: object,
    ) -> TrainResult:
        """Train one step of the model on these groups.

        Pass `config`, or TrainConfig's fields as `options`. A request with the same `request_id` is applied once.
        `on_event` receives progress events; `pbar_desc=None` shows no progress bar. For code written for OpenPipe ART,
        `trajectory_groups` is an alias of `groups`, and `verbose` is ignored. Raises ConfigError, TrainError (the step was not applied), ServerError, TimeoutError
        (after `timeout` seconds).
        """
        chosen = _groups_of(groups, options)
        settings = one_config(TrainConfig, config, options)
        await model.register(self)
        return await train_groups(
            await model.api(),
            model.name,
            chosen,
            settings,
            request_id=request_id,
            on_event=on_event,
            pbar_desc=pbar_desc,
            timeout=timeout,
        )


class RemoteBackend(Backend):
    """The server at `url`. The default of `api_key` is the environment variable OFFBOOK_API_KEY."""

    @names_checked("RemoteBackend")
    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = checked_url(url)
        self._api = Api(self.url, api_key or os.environ.get("OFFBOOK_API_KEY"))

    @property
    def api_key(self) -> str | None:
        """The key that is sent; None: none."""
        return self._api.key

    async def connect(self, base_model: str | None = None) -> Api:
        """Return the server without contacting it: an unreachable server fails the first request."""
        return self._api

    def watched_at(self, run: str) -> str:
        """Return the address of the run's page."""
        return f"{self.url}/runs/{run}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it with its key, for this user's own processes."""
        return type(self), (self.url, self._api.key)

    def __repr__(self) -> str:
        return f"RemoteBackend({self.url!r})"


OptionsT = TypeVar("OptionsT", bound=Options)


def one_config(
    kind: type[OptionsT], config: OptionsT | Mapping[str, object] | None, options: Mapping[str, object]
) -> OptionsT:
    """The options of a training, from `config` or from single `options`. Raises ConfigError for both, and for an invalid or
    unknown option."""
    if config is not None and options:
        kind.parse(**options)  # raises ConfigError naming our equivalent of another trainer's option
        raise ConfigError(f"give either config= or single options, not both (got config and {sorted(options)})")
    if isinstance(config, kind):
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config: expected a {kind.__name__} or a dict of its options, got {config!r}")
    return kind.parse(**(options if config is None else config))


def _groups_of(groups: Iterable[TrajectoryGroup] | None, options: dict[str, object]) -> Iterable[TrajectoryGroup]:
    """The groups of a step, also from OpenPipe ART's `trajectory_groups`. Removes it and `verbose` from `options`."""
    options.pop("verbose", None)
    named = cast("Iterable[TrajectoryGroup] | None", options.pop("trajectory_groups", None))
    if (groups is None) == (named is None):
        raise ConfigError("groups: a step needs one list of TrajectoryGroups")
    return cast("Iterable[TrajectoryGroup]", named if groups is None else groups)


async def train_groups(
    api: Api,
    model: str,
    groups: Iterable[TrajectoryGroup],
    config: TrainConfig,
    *,
    request_id: str | None = None,
    on_event: Callable[[TrainEvent], None] | None = None,
    pbar_desc: str | None = None,
    timeout: float | None = None,
    logs: bool = True,
    replayed: Sequence[str] = (),
) -> TrainResult:
    """Finish every rollout on the server, then send one train request for the groups.

    `logs=False`: the caller says the result's warnings, and why no step was applied. `replayed`: ids of finished
    rollouts of earlier steps, which a step with `min_reward` imitates again. Raises as `Backend.train`. A
    TrainError because no group was scored also says why rollouts failed.
    """
    request_id = request_id or new_id("train")
    wires = group_wires(groups, model, request_id)
    rollouts = [record for records, _ in wires for record in records]
    recorded = await api.finish(rollouts)
    require_calls(wires, recorded)
    groups_sent = tuple(record for _, record in wires)
    request = TrainRequest(id=request_id, model=model, groups=groups_sent, config=config, replayed=tuple(replayed))
    with TrainBar(pbar_desc, logs=logs) as bar:

        def show_event(event: TrainEvent) -> None:
            bar.show(event)
            if on_event is not None:
                on_event(event)

        try:
            result = await train(api, request, on_event=show_event, timeout=timeout)
        except TrainError as error:
            kinds = failure_kinds(rollout.exception for rollout in rollouts if rollout.exception is not None)
            if error.reason != "no_scored_groups" or not kinds:
                raise
            raise TrainError(f"{error}\nWhy rollouts failed: {details(kinds)}", reason=error.reason) from error
        bar.ended(result)
        return result


class Registration:
    """One model on one backend. `server` is the server that knows the model; None before the first use."""

    def __init__(self, backend: Backend, request: RegisterRequest) -> None:
        self.backend = backend
        self.server: Api | None = None
        self._request = request
        self._lock = threading.Lock()
        self._attempt: Future[Api | None] | None = None

    async def api(self) -> Api:
        """Return the running server with the model registered.

        Callers that arrive during an attempt share its result or its error, so eight rollouts that begin at once start one
        server and send one request. If the attempt is cancelled, one of the waiting callers makes the next.
        """
        while True:
            with self._lock:
                attempt, leads = self._attempt, self._attempt is None
                if attempt is None:
                    attempt = self._attempt = Future()
                    attempt.set_running_or_notify_cancel()  # a cancelled waiter must not cancel the attempt
            api = await (self._lead(attempt) if leads else asyncio.wrap_future(attempt))
            if api is not None:
                return api

    async def _lead(self, attempt: Future[Api | None]) -> Api:
        try:
            api = await self._connect()
        except Exception as error:
            self._attempt = None
            attempt.set_exception(error)
            raise
        except BaseException:  # cancelled, interrupted
            self._attempt = None
            attempt.set_result(None)
            raise
        self._attempt = None
        attempt.set_result(api)
        return api

    async def _connect(self) -> Api:
        """Connect through the backend, and register again if it returned a new server: that one does not know the model."""
        api = await self.backend.connect(self._request.base_model)
        if api is not self.server:
            await api.register(self._request)
            self.server = api
        return api
