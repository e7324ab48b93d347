"""The OpenTelemetry context in which a rollout ran, where the app has one."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, Final

from understudy.types import Json, Trajectory

TRACEPARENT: Final = "traceparent"
"""Key of a trajectory's metadata: W3C Trace Context of the span in which the rollout ran."""
_SHAPE = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


@dataclass(frozen=True)
class RemoteParent:
    """A span of the app's: ids as OpenTelemetry has them."""

    trace_id: int
    span_id: int


def keep_trace_context(trajectory: Trajectory) -> None:
    """Note the span that is current here, unless the rollout has noted one itself."""
    current = current_traceparent()
    if current is not None and TRACEPARENT not in trajectory.metadata:
        trajectory.metadata[TRACEPARENT] = current


def current_traceparent() -> str | None:
    """The current span's context; None where the app uses no OpenTelemetry, or is in no span."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def remote_parent(metadata: dict[str, Json]) -> RemoteParent | None:
    """The span that a rollout continues."""
    found = _SHAPE.fullmatch(str(metadata.get(TRACEPARENT, "")))
    if found is None or not int(found[1], 16) or not int(found[2], 16):
        return None
    return RemoteParent(int(found[1], 16), int(found[2], 16))
