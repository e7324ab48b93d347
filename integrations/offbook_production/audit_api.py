"""Which traffic trained which step, asked in both directions, and the removal of traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter

from offbook.base.errors import StoreError
from offbook.server.errors import ApiError
from offbook.server.http.json_body import JsonRoute

from .audits import AuditRequest, Removal, StepAudit, TrajectoryAudit
from .gateway.threads import trajectory_id
from .production import Production, ProductionDep
from .records.audit import audited, derived, is_recorded, trained_steps
from .records.lineage import Lineage, names, read_lineage
from .records.removal import erase, remove
from .records.removed_files import remove_from_files

router = APIRouter(prefix="/api/audit", route_class=JsonRoute)


@router.get("/{model}/{step}")
async def step(model: str, step: int, production: ProductionDep) -> StepAudit:
    """What trained a step: trajectories with their calls, and the steps that it goes on from. 404 for a step that never was."""
    lineage = await _lineage(production)
    place, trained = (model, step), lineage.trained.get((model, step))
    if trained is None and place not in lineage.origins:
        production.server.models.registry.model(model).route(step)
    ids = () if trained is None else trained.trajectory_ids
    before = list(lineage.before(place)) if step > 0 else []
    return StepAudit(
        model=model,
        step=step,
        request_id=None if trained is None else trained.request_id,
        trajectories=tuple(await production.server.store.read(lambda connection: audited(connection, ids))),
        after=names(before),
        unrecorded=names(lineage.unrecorded([place, *before] if step > 0 else [])),
    )


@router.post("")
async def trajectories(request: AuditRequest, production: ProductionDep) -> list[TrajectoryAudit]:
    """The steps that each trajectory trained. 404 for one that is neither recorded nor in a train request."""
    return await _audit(production, _ids(request, production))


@router.post("/removal")
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


def _ids(request: AuditRequest, production: Production) -> list[str]:
    route = request.route or production.options.route
    threads = (trajectory_id(route, thread) for thread in request.thread_ids)
    return list(dict.fromkeys((*request.trajectory_ids, *threads)))


async def _audit(production: Production, ids: Sequence[str]) -> list[TrajectoryAudit]:
    lineage = await _lineage(production)
    copies, recorded = await production.server.store.read(
        lambda connection: (derived(connection, ids), is_recorded(connection, ids))
    )
    by_id: dict[str, list[tuple[str, int]]] = {}
    for place, one in lineage.trained.items():
        for name in one.trajectory_ids:
            by_id.setdefault(name, []).append(place)
    audits: list[TrajectoryAudit] = []
    for name in ids:
        if name not in recorded and name not in by_id and not copies[name]:
            message = f"no trajectory {name!r}: nothing was recorded under that id, and no train request had it"
            raise ApiError(404, message, "trajectory_ids", "unknown_trajectory")
        places = dict.fromkeys(place for one in (name, *copies[name]) for place in by_id.get(one, ()))
        audits.append(
            TrajectoryAudit(
                id=name,
                recorded=name in recorded,
                derived=copies[name],
                trained=names(places),
                seen_since=lineage.seen_since(places),
            )
        )
    return audits


async def _lineage(production: Production) -> Lineage:
    trained = await production.server.store.read(trained_steps)
    return await asyncio.to_thread(read_lineage, production.server.options.dir, trained)
