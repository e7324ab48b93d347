"""The entry point of the group `offbook.server`: the part of the server, with its routes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Depends, Request
from sqlalchemy import MetaData
from starlette.types import ASGIApp

from offbook.base import clock
from offbook.base.errors import ConfigError, StoreError
from offbook.base.http_access import is_loopback
from offbook.base.redaction import mask_personal
from offbook.base.wire import name_at
from offbook.server.errors import ApiError
from offbook.server.http.json_body import JsonRoute
from offbook.server.wing import ServerDoor, ServerWing

from .audit import copied_steps, derived, is_recorded, seen_since, trained_steps
from .feedback import Feedback, add_feedback, keep_feedback
from .options import ProductionOptions
from .passing import RouteCalls, UpstreamGateway
from .removal import erase, remove, remove_from_files
from .takeover import Takeover
from .takeover_threads import metadata
from .threads import trajectory_id
from .traffic import RouteState, RouteTraffic
from .upstream import upstream_model
from .wire import (
    AuditRequest,
    FeedbackRequest,
    FeedbackResult,
    Removal,
    TakeoverRule,
    TakeoverState,
    TrajectoryAudit,
)

router = APIRouter(route_class=JsonRoute)
SETTLE_SECONDS = 5.0
"""How long feedback on an unknown call waits for the calls that are still to be recorded."""


class ProductionWing(ServerWing):
    """The gateway before the paid model (None without --upstream) with its takeover, feedback, the audit and removal."""

    name: ClassVar[str] = "production"
    router: ClassVar[APIRouter | None] = router
    tables: ClassVar[MetaData | None] = metadata

    def __init__(self, options: Any, server: ServerDoor) -> None:
        super().__init__(options or ProductionOptions(), server)
        self.options: ProductionOptions
        self.gateway: UpstreamGateway | None = None

    async def open(self) -> None:
        """Connect to the paid model, and go on with the takeover of the records."""
        self.server.store.before_finish.append(keep_feedback)
        options, server = self.options, self.server
        if options.upstream is None:
            return
        model = upstream_model(options.upstream)
        if model.key is None and (server.options.api_key is not None or not is_loopback(server.options.host)):
            raise ConfigError(
                f"--upstream {options.upstream}: clients send this server's key, so it needs the provider's: set "
                "OPENAI_API_KEY or the like, or name a variable with ?api_key_variable=NAME"
            )
        traffic = RouteTraffic(options, model, server.store, server.recorder.sampled)
        await traffic.open()
        takeover = Takeover(options.route, server.store)
        await takeover.open()
        self.gateway = UpstreamGateway(traffic, takeover)

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Calls below /r/ROUTE/ pass to the paid model, before the server's own routing."""
        return RouteCalls(app, self.gateway, self.server.sampler)

    def ready_rows(self, url: str) -> Sequence[tuple[str, str]]:
        """Where the app's calls go."""
        if self.gateway is None:
            return ()
        share = self.options.record_share
        recorded = f"{100 * share:.4g} % of its threads are recorded" if share else "counted, nothing recorded"
        model = self.gateway.traffic.upstream.text
        return [("route", f"{url}/r/{self.options.route} -> {model}, {recorded}")]

    def answers_without_sampler(self) -> bool:
        """With a paid model: calls pass to it all the same."""
        return self.gateway is not None

    async def close(self, deadline: float) -> None:
        """Finish reading and recording, and store what is not stored."""
        if self.gateway is not None:
            await self.gateway.close()


async def _of_request(request: Request) -> ProductionWing:
    """Async, since FastAPI calls plain functions in a thread."""
    return ProductionWing.of(request)


ProductionDep = Annotated[ProductionWing, Depends(_of_request)]


@router.post("/api/feedback")
async def feedback(request: FeedbackRequest, production: ProductionDep) -> FeedbackResult:
    """Store a score for a finished trajectory, found by its id, by one of its calls, or by the app's name of its thread."""
    name = request.trajectory_id
    if request.thread_id is not None:
        name = trajectory_id(request.route or production.options.route, request.thread_id)
    if request.comment is not None and not production.options.keep_personal:
        request = request.model_copy(update={"comment": mask_personal(request.comment)})
    try:
        result = await _stored(Feedback(request, name, clock.now()), production)
    except ApiError as error:
        if error.status != 404 or name is None:
            raise
        first = await _scored(request, name, production)  # a takeover's thread need not be recorded
        if first is None:
            raise
        return FeedbackResult(trajectory_id=name, reward=request.score, changed=first)
    with suppress(ApiError):  # a score beyond the rule's is feedback all the same
        await _scored(request, result.trajectory_id, production)
    return result


async def _stored(feedback: Feedback, production: ProductionWing) -> FeedbackResult:
    try:
        return await production.server.store.write(add_feedback, feedback)
    except ApiError as error:
        if error.status != 404:
            raise
        if production.gateway is not None:
            with suppress(TimeoutError):  # its call may have been answered just now
                await asyncio.wait_for(production.gateway.traffic.settled(), SETTLE_SECONDS)
        return await production.server.store.write(add_feedback, feedback)


async def _scored(request: FeedbackRequest, trajectory: str, production: ProductionWing) -> bool | None:
    """Take a score in as evidence of the takeover that has its thread, after the records have taken it: what they refuse is no
    evidence. Returns whether it is the thread's first; None: no evidence. Raises ApiError 400 for one beyond the rule's."""
    if production.gateway is None:
        return None
    answered_by = None
    if request.call_id is not None:
        record = (await production.server.store.finished([trajectory])).get(trajectory)
        calls = () if record is None else record.outside_calls
        answered_by = next((call.model for call in calls if call.id == request.call_id), None)
    return await production.gateway.takeover.score(trajectory, request.name, request.score, answered_by)


@router.get("/api/routes")
async def routes(production: ProductionDep) -> list[RouteState]:
    """The app behind --route, with what was counted of it; nothing without --upstream."""
    if production.gateway is None:
        return []
    traffic = production.gateway.traffic
    named = {"name": traffic.name, "upstream": traffic.upstream.text, "record_share": traffic.options.record_share}
    return [RouteState.model_validate(named | traffic.counts.model_dump())]


@router.get("/api/takeover")
async def state(production: ProductionDep) -> TakeoverState:
    """The state of the takeover, with its numbers and every decision."""
    return _gateway(production).takeover.current()


@router.post("/api/takeover/start")
async def start(rule: TakeoverRule, production: ProductionDep) -> TakeoverState:
    """Begin a takeover. 409 while one is under way, 404 for an unknown model. It pins the small model's step, so that training goes
    on without changing what is compared."""
    takeover, server = _gateway(production).takeover, production.server
    chosen = server.models.registry.resolve(rule.model or server.options.name)
    pinned = f"{chosen.model}@{chosen.step}" if chosen.model != server.base.name else chosen.model
    return await takeover.start(rule, pinned)


@router.post("/api/takeover/stop")
async def stop(production: ProductionDep) -> TakeoverState:
    """Give all calls to the paid model again. 409 if they are there."""
    return await _gateway(production).takeover.stop()


def _gateway(production: ProductionWing) -> UpstreamGateway:
    if production.gateway is None:
        raise ApiError(404, "no takeover: start the server with --upstream", code="unknown_route")
    return production.gateway


@router.post("/api/audit")
async def trajectories(request: AuditRequest, production: ProductionDep) -> list[TrajectoryAudit]:
    """The steps that each trajectory trained. 404 for one that is neither recorded nor in a train request."""
    return await _audit(production, _ids(request, production))


@router.post("/api/audit/removal")
async def removal(request: AuditRequest, production: ProductionDep) -> Removal:
    """Delete trajectories, those made from them, and what files have of them; name the steps that they trained. Steps stay.

    404 as for the audit, 409 while a train request that has one of them waits or runs."""
    if production.gateway is not None:
        await production.gateway.traffic.settled()
    audits = await _audit(production, _ids(request, production))
    ids = tuple(dict.fromkeys(name for one in audits for name in (one.id, *one.derived)))
    removed = await production.server.store.write(remove, ids)
    production.server.recorder.sampled.forget(ids)
    try:
        files = await asyncio.to_thread(remove_from_files, production.server.options.dir, frozenset(ids))
    except OSError as error:
        raise StoreError(
            f"the records are deleted, but not what files in {production.server.options.dir} have of them ({error}): make them "
            "writable, and remove the same again"
        ) from error
    erased = await production.server.store.alone(erase)
    return Removal(
        trajectories=tuple(audits), records=removed.trajectories, calls=removed.calls, files=files, erased=erased
    )


def _ids(request: AuditRequest, production: ProductionWing) -> list[str]:
    route = request.route or production.options.route
    threads = (trajectory_id(route, thread) for thread in request.thread_ids)
    return list(dict.fromkeys((*request.trajectory_ids, *threads)))


async def _audit(production: ProductionWing, ids: Sequence[str]) -> list[TrajectoryAudit]:
    copies, recorded, trained = await production.server.store.read(
        lambda connection: (derived(connection, ids), is_recorded(connection, ids), trained_steps(connection))
    )
    origins = await asyncio.to_thread(copied_steps, production.server.options.dir)
    audits: list[TrajectoryAudit] = []
    for name in ids:
        if name not in recorded and name not in trained and not copies[name]:
            message = f"no trajectory {name!r}: nothing was recorded under that id, and no train request had it"
            raise ApiError(404, message, "trajectory_ids", "unknown_trajectory")
        places = dict.fromkeys(place for one in (name, *copies[name]) for place in trained.get(one, ()))
        audits.append(
            TrajectoryAudit(
                id=name,
                recorded=name in recorded,
                derived=copies[name],
                trained=tuple(name_at(*place) for place in places),
                seen_since=seen_since(places, origins),
            )
        )
    return audits
