"""Where inference and training run, as seen from the user's process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, Self

from ..config import ELSEWHERE, TrainConfig
from ..errors import ConfigError, TrainError
from ..types import TrainResult, TrajectoryGroup, new_id
from ..wire import TrainEvent, TrainRequest
from .failures import details, failure_kinds
from .http import Api, checked_url
from .other_trainers import groups_of
from .progress import TrainBar
from .records import group_wires, require_calls
from .train_stream import train


class BackendModel(Protocol):
    """What a backend needs of a model."""

    @property
    def name(self) -> str: ...

    async def register(self, backend: Backend) -> None: ...

    async def api(self) -> Api: ...


class Backend(ABC):
    """A server that samples and trains. `LocalBackend` starts one here, `RemoteBackend` uses one elsewhere."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Raises ConfigError for `Backend(base_url=...)`, as other trainers have it."""
        if cls is Backend:
            raise ConfigError("Backend is what backends have in common: use RemoteBackend(url), or LocalBackend()")
        return super().__new__(cls)

    @abstractmethod
    async def connect(self, base_model: str | None = None) -> Api:
        """The server, up and answering; `base_model` is what it loads when it has to be started."""

    def path_on_server(self, path: str | os.PathLike[str]) -> str:
        """A path of the user's as the server's machine takes it: as it is, where that is another one."""
        return os.fspath(path)

    async def register(self, model: BackendModel) -> None:
        """Make the model known to the server. Idempotent; another base model under its name is a ServerError."""
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
        """One step of the model on these groups. `options` are TrainConfig's fields, instead of `config`; `groups` may be
        called `trajectory_groups`, and `verbose` is taken and changes nothing.

        The same `request_id` is applied once. `on_event` sees progress; `pbar_desc=None` shows no bar. Raises
        ConfigError, TrainError, ServerError, TimeoutError (after `timeout` seconds).
        """
        chosen = groups_of(groups, options)
        settings = train_config(config, options)
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
    """The server at `url`. Without `api_key`, the environment variable UNDERSTUDY_API_KEY is sent, if set."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = checked_url(url)
        self._api = Api(self.url, api_key or os.environ.get("UNDERSTUDY_API_KEY"))

    async def connect(self, base_model: str | None = None) -> Api:
        """The server; its first request tells whether it answers."""
        return self._api

    def __repr__(self) -> str:
        return f"RemoteBackend({self.url!r})"


def train_config(config: TrainConfig | Mapping[str, object] | None, options: Mapping[str, object]) -> TrainConfig:
    """Options as given, as one TrainConfig; raises ConfigError naming what is wrong."""
    if config is not None and options.keys() & ELSEWHERE.keys():
        TrainConfig.parse(**options)  # names the equivalent
    if config is not None and options:
        raise ConfigError(f"give either config= or single options, not both (got config and {sorted(options)})")
    if isinstance(config, TrainConfig):
        return config
    if config is not None and not isinstance(config, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
        raise ConfigError(f"config: expected a TrainConfig or a dict of its options, got {config!r}")
    return TrainConfig.parse(**(config or options))


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
) -> TrainResult:
    """Finish every rollout, then train on the groups in one request."""
    request_id = request_id or new_id("train")
    wires = group_wires(groups, model, request_id)
    rollouts = [record for records, _ in wires for record in records]
    recorded = await api.finish(rollouts)
    require_calls(wires, recorded)
    request = TrainRequest(id=request_id, model=model, groups=tuple(record for _, record in wires), config=config)
    with TrainBar(pbar_desc) as bar:

        def seen(event: TrainEvent) -> None:
            bar.show(event)
            if on_event is not None:
                on_event(event)

        try:
            return await train(api, request, on_event=seen, timeout=timeout)
        except TrainError as error:
            kinds = failure_kinds(rollout.exception for rollout in rollouts if rollout.exception is not None)
            if error.reason != "no_scored_groups" or not kinds:
                raise
            raise TrainError(f"{error}\nWhy rollouts failed: {details(kinds)}", reason=error.reason) from error
