"""Which traffic trained which step, asked in both directions, and the removal of traffic."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter

from offbook.base.audits import AuditRequest, Removal, StepAudit, TrajectoryAudit
from offbook.base.errors import StoreError

from ..errors import ApiError
from ..lineage import Lineage, names, read_lineage
from ..records.audit import audited, derived, is_recorded, trained_steps
from ..records.removal import erase, remove
from ..removed_files import remove_from_files
from ..services import Services, ServicesDep
from ..upstream.threads import trajectory_id
from .json_body import JsonRoute

router = APIRouter(prefix="/api/audit", route_class=JsonRoute)


@router.get("/{model}/{step}")
async def step(model: str, step: int, services: ServicesDep) -> StepAudit:
    """What trained a step: trajectories with their calls, and the steps that it goes on from. 404 for a step that never was."""
    lineage = await _lineage(services)
    place, trained = (model, step), lineage.trained.get((model, step))
    if trained is None and place not in lineage.origins:
        services.models.registry.model(model).route(step)
    ids = () if trained is None else trained.trajectory_ids
    before = list(lineage.before(place)) if step > 0 else []
    return StepAudit(
        model=model,
        step=step,
        request_id=None if trained is None else trained.request_id,
        trajectories=tuple(await services.store.read(lambda connection: audited(connection, ids))),
        after=names(before),
        unrecorded=names(lineage.unrecorded([place, *before] if step > 0 else [])),
    )


@router.post("")
async def trajectories(request: AuditRequest, services: ServicesDep) -> list[TrajectoryAudit]:
    """The steps that each trajectory trained. 404 for one that is neither recorded nor in a train request."""
    return await _audit(services, _ids(request, services))


@router.post("/removal")
async def removal(request: AuditRequest, services: ServicesDep) -> Removal:
    """Delete trajectories, those made from them, and what files have of them; name the steps that they trained. Steps stay.

    404 as for the audit, 409 while a train request that has one of them waits or runs."""
    if services.upstream is not None:
        await services.upstream.traffic.settled()
    audits = await _audit(services, _ids(request, services))
    ids = tuple(dict.fromkeys(name for one in audits for name in (one.id, *one.derived)))
    removed = await services.store.write(remove, ids)
    services.recorder.sampled.forget(ids)
    try:
        files = await asyncio.to_thread(remove_from_files, services.options.dir, frozenset(ids))
    except OSError as error:
        raise StoreError(
            f"the records are deleted, but not what files in {services.options.dir} have of them ({error}): make them "
            "writable, and remove the same again"
        ) from error
    erased = await services.store.alone(erase)
    return Removal(
        trajectories=tuple(audits), records=removed.trajectories, calls=removed.calls, files=files, erased=erased
    )


def _ids(request: AuditRequest, services: Services) -> list[str]:
    route = request.route or services.options.route
    threads = (trajectory_id(route, thread) for thread in request.thread_ids)
    return list(dict.fromkeys((*request.trajectory_ids, *threads)))


async def _audit(services: Services, ids: Sequence[str]) -> list[TrajectoryAudit]:
    lineage = await _lineage(services)
    copies, recorded = await services.store.read(
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


async def _lineage(services: Services) -> Lineage:
    trained = await services.store.read(trained_steps)
    return await asyncio.to_thread(read_lineage, services.options.dir, trained)
