"""Links a rollout to the OpenTelemetry span in which it ran, if the app uses OpenTelemetry."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any, Final

from offbook.base.types import Json, Trajectory

TRACEPARENT: Final = "traceparent"
"""Metadata key of a trajectory for the W3C Trace Context of the span in which the rollout ran."""
_SHAPE = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


@dataclass(frozen=True)
class RemoteParent:
    """A span of the app, by OpenTelemetry's ids."""

    trace_id: int
    span_id: int


def keep_trace_context(trajectory: Trajectory) -> None:
    """Store the current span in the trajectory's metadata, unless the rollout has already stored one."""
    current = current_traceparent()
    if current is not None and TRACEPARENT not in trajectory.metadata:
        trajectory.metadata[TRACEPARENT] = current


def current_traceparent() -> str | None:
    """The current span's `traceparent`; None if the app does not use OpenTelemetry or no span is active."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def remote_parent(metadata: dict[str, Json]) -> RemoteParent | None:
    """The app's span that a rollout continues; None without a valid one in the metadata."""
    match = _SHAPE.fullmatch(str(metadata.get(TRACEPARENT, "")))
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return RemoteParent(int(match[1], 16), int(match[2], 16))
