"""The entry point of the group `offbook.server`: the part of the server, with its routes."""

from __future__ import annotations

from typing import ClassVar

from fastapi import APIRouter

from . import audit_api, feedback_api, takeover_api
from .production import Production

_router = APIRouter()
for _part in (feedback_api, takeover_api, audit_api):
    _router.routes.extend(_part.router.routes)  # include_router would make each route anew


class ProductionWing(Production):
    """The gateway, takeovers, feedback, the audit and removal."""

    router: ClassVar[APIRouter | None] = _router
