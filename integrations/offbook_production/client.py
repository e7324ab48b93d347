"""The requests for the audit and removal."""

from __future__ import annotations

from offbook.client.connection.http import Api

from .wire import AuditRequest, Removal, TrajectoryAudit


async def audit_trajectories(api: Api, request: AuditRequest) -> list[TrajectoryAudit]:
    """The steps that each of these trajectories trained."""
    return await api.ask(list[TrajectoryAudit], "POST", "/api/audit", request)


async def remove_trajectories(api: Api, request: AuditRequest) -> Removal:
    """Delete these trajectories, and those made from them; may take up to an hour with large records."""
    return await api.ask(Removal, "POST", "/api/audit/removal", request, timeout=3600)
