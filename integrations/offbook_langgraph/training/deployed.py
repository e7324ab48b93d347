"""`deployed()`: the app on its own models, of which small ones take over calls by evidence, as a server decides."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from pydantic import SecretStr, TypeAdapter, ValidationError

from offbook import RemoteBackend, TrainableModel
from offbook.base.errors import ConfigError
from offbook.base.server_options import RouteName
from offbook.base.takeovers import TakeoverPlan
from offbook_langgraph.calls.active_capture import ActiveCapture, CallRoute
from offbook_langgraph.calls.deployed_calls import DeployedChat, PaidRuns, Prices
from offbook_langgraph.calls.langchain_patches import install
from offbook_langgraph.calls.origins import Predicate
from offbook_langgraph.calls.takeover_sides import TakeoverSides
from offbook_langgraph.chat_model import KEY_VARIABLE

Policy: TypeAlias = TakeoverPlan | Mapping[str, TakeoverPlan]
"""How small models take over: one plan for all, or one for each model's name."""
_ROUTE: TypeAdapter[str] = TypeAdapter(RouteName)


@dataclass(frozen=True)
class Deployment:
    """Which calls of an app are part of a takeover: for each model a route of its name, on the server at `url`.

    Raises ConfigError for a policy that names no model here, and for a model whose name is too long for a route."""

    models: Mapping[TrainableModel, Predicate | None]
    url: str
    api_key: str | None
    policy: Policy | None = None
    exclude: Predicate | None = None
    temperature: float | None = None
    prices: Prices | None = None

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        plans: Mapping[str, object] = (
            self.policy if isinstance(self.policy, Mapping) else dict.fromkeys(names, self.policy)
        )
        if unknown := sorted(set(plans) - set(names)):
            raise ConfigError(f"policy: there is no model {unknown[0]!r} here; there are {', '.join(names)}")
        for plan in plans.values():
            if plan is not None and not isinstance(plan, TakeoverPlan):
                raise ConfigError(f"policy: an offbook.TakeoverPlan is needed, got {plan!r:.200}")
        for name in names:
            try:
                _ROUTE.validate_python(name)
            except ValidationError as error:
                raise ConfigError(f"deployed: the route of model {name!r}: {error.errors()[0]['msg']}") from error

    @cached_property
    def _sides(self) -> TakeoverSides:
        policy = self.policy or {}
        plans = {model.name: policy for model in self.models} if isinstance(policy, TakeoverPlan) else policy
        return TakeoverSides(self.url, self.api_key, plans)

    @cached_property
    def _routes(self) -> tuple[CallRoute, ...]:
        key = SecretStr(self.api_key or "none")
        small = {
            model: DeployedChat(
                model=model.name,
                base_url=f"{self.url}/r/{model.name}/v1",
                api_key=key,
                temperature=self.temperature,
                route=model.name,
            ).deployed(self._sides, self.prices or {})
            for model in self.models
        }
        return tuple(CallRoute(small[model], select) for model, select in self.models.items())

    async def capture(self) -> ActiveCapture:
        """Create the capture that asks for each call's side."""
        return self.capture_now()

    def capture_now(self) -> ActiveCapture:
        """As `capture`, for sync code. It asks the server nothing."""
        install()
        return ActiveCapture(routes=self._routes, exclude=self.exclude, runs=PaidRuns(self._sides), deployed=True)


def server_of(
    url: str | None, api_key: str | None, models: Mapping[TrainableModel, Predicate | None]
) -> tuple[str, str | None]:
    """The server's URL without /v1, and its key: as named, else of the models' own backend. Raises ConfigError without one."""
    key = api_key or os.environ.get(KEY_VARIABLE)
    if url is not None:
        return url.rstrip("/").removesuffix("/v1"), key
    backends = {model.backend for model in models}
    backend = backends.pop()
    if backends or not isinstance(backend, RemoteBackend):
        raise ConfigError(
            "deployed: url: the address of the server that has the small model is needed, such as http://gpu-box:8000, here "
            "or as OFFBOOK_URL. A server that this process starts would end with it"
        )
    return backend.url, key or backend.api_key
