"""Routes without an upstream: the app asks its paid models itself, and this server for the side of each call.

The takeover, its evidence and the counts are those of the gateway. What the gateway sees pass, the app reports.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from offbook.base import clock
from offbook.base.app_calls import AppCall, SideAnswer, SideRequest
from offbook.base.errors import ConfigError
from offbook.base.types import Json, new_id
from offbook.llms.options import LlmOptions, Price
from offbook.llms.prices import price_of
from offbook.llms.provider import installed_prices

from ..calls.sampled_calls import SampledCalls
from ..errors import ApiError
from ..records.notes import TAKEOVER_NOTE, notes_under
from ..records.store import Store
from ..sampler.sampler import Sampler
from ..takeover.small_answers import SamplerReadiness, SmallAnswer, SmallModel
from ..takeover.takeover import Takeover
from .traffic import PassedCall, RecordingPolicy, RouteTraffic

logger = logging.getLogger(__name__)

MOST_ROUTES = 100
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class AppRoute:
    """A route whose app asks its paid models itself."""

    traffic: RouteTraffic
    takeover: Takeover
    small: SmallModel

    async def answer(self, call: PassedCall, scope: Scope) -> SmallAnswer:
        """The small model's answer to a call on its side. Raises ApiError if there is none, and the app's own model answers."""
        side, answer = "paid", None
        with self.traffic.step("takeover"):
            side, answer = await self._answer(call, scope)
        if answer is not None:
            return answer
        if side == "paid":
            raise ApiError(409, "this call is on the side of the app's own model", code="paid_side")
        raise ApiError(503, f"the small model failed: {side}", code="small_model_failed")

    async def _answer(self, call: PassedCall, scope: Scope) -> tuple[str, SmallAnswer | None]:
        """The small model's answer; None on the side "paid", or with why it failed."""
        if not self.takeover.asks_small(call.thread):
            return "paid", None
        stage = self.takeover.stage
        answer = await self.small.answer(call, CHAT, scope)
        stage.add_call(clock.end_of(call.started_at) - call.started_at, answer.failure)
        self.takeover.decide()
        if answer.failure is not None:
            return answer.failure, None
        call.on_cost = stage.add_small_cost
        call.small = (self.takeover.state.model, self.small.price)
        return "small", answer

    async def note(self, told: AppCall, scope: Scope) -> None:
        """Take in a call that the app's own model has answered. Its cost is that of its thread's side, whoever answered."""
        answer = [] if told.answer is None else [_bytes(told.answer)]
        call = PassedCall(
            new_id("call"),
            None,
            {},
            _bytes(told.request),
            thread=told.thread_id,
            started_at=told.started_at,
            ended_at=max(told.started_at, told.ended_at),
            status=200 if answer else 502,
            answer=answer,
            paid=(told.model, None),
        )
        step = self.traffic.step
        with step("price"):
            call.paid = (told.model, await _price(told))
        with step("takeover"):
            if self.takeover.active:
                stage = self.takeover.stage
                call.on_cost = stage.add_small_cost if self.takeover.asks_small(call.thread) else stage.add_paid_cost
        with step("place"):
            self.traffic.place(call)
        with step("note"):
            self.traffic.note(call)
        with step("shadow"):
            self.small.shadow(call, CHAT, scope)


def _bytes(value: dict[str, Json]) -> bytes:
    """As a body on the wire. Not by orjson, which refuses integers beyond 64 bits."""
    return json.dumps(value).encode()


async def _price(told: AppCall) -> Price | None:
    if told.prices is not None:
        return Price(prompt=told.prices[0], completion=told.prices[1])
    table = await asyncio.to_thread(installed_prices)
    try:
        return price_of(LlmOptions(model=told.model, cache=None), table)
    except ConfigError:  # no provider/model, so no price
        return None


class AppRoutes:
    """The routes of apps that ask their paid models themselves, opened by their first use. Needs a running event loop."""

    def __init__(self, policy: RecordingPolicy, store: Store, recorded: SampledCalls) -> None:
        self._policy = policy
        self._store = store
        self._recorded = recorded
        self._routes: dict[str, AppRoute] = {}
        self._opening = asyncio.Lock()
        self._app: ASGIApp | None = None
        self.readiness = SamplerReadiness()

    def connect(self, app: ASGIApp, sampler: Sampler) -> None:
        """Where the small models are asked: the server's application below the middleware; and the sampler that answers."""
        self._app = app
        self.readiness.sampler = sampler

    def __iter__(self) -> Iterator[AppRoute]:
        return iter(list(self._routes.values()))

    async def open(self, gateway: str | None) -> None:
        """Go on with every takeover of the records, but that of the `gateway`'s route. Raises StoreError."""
        for name in await self._store.read(lambda connection: notes_under(connection, TAKEOVER_NOTE)):
            if name != gateway and name not in self._routes:
                try:
                    await self.opened(name)
                except ApiError as error:  # one too many, which its own calls will be told too
                    logger.error("the takeover of %s does not go on: %s", name, error)

    def get(self, name: str) -> AppRoute | None:
        """A route that was used; None for another one."""
        return self._routes.get(name)

    async def opened(self, name: str) -> AppRoute:
        """The route of this name. Raises ApiError 409 for one too many, StoreError."""
        async with self._opening:
            route = self._routes.get(name)
            if route is None:
                if len(self._routes) >= MOST_ROUTES:
                    raise ApiError(409, f"{name!r}: a server has at most {MOST_ROUTES} routes", code="too_many_routes")
                traffic = RouteTraffic(name, None, self._policy, self._store, self._recorded)
                await traffic.open()
                takeover = Takeover(name, self._store)
                await takeover.open()
                route = AppRoute(traffic, takeover, SmallModel(self._below, takeover, traffic, self.readiness))
                self._routes[name] = route
        return route

    async def side(self, name: str, request: SideRequest, model: str | None) -> SideAnswer:
        """Which side answers a call. `model`: of the takeover that begins with the request's plan, if the route has had none."""
        route = await self.opened(name)
        takeover = route.takeover
        if request.plan is not None and model is not None:
            async with self._opening:
                if not takeover.state.id:
                    await takeover.start(request.plan, model)
        call = PassedCall(new_id("call"), None, {}, _bytes(request.request), thread=request.thread_id)
        small = False
        with route.traffic.step("takeover"):
            small = route.small.chosen(call, CHAT)
        return SideAnswer(small=small, seconds=takeover.state.plan.answer_seconds)

    async def close(self) -> None:
        """Finish reading and recording, and store what is not stored."""
        async with self._opening:  # a late call may be opening one
            for route in self:
                await route.traffic.close()
                await route.takeover.close()

    async def _below(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._app is not None, "the middleware connects it before any call"
        await self._app(scope, receive, send)
