"""Sends spans over OTLP in batches, and reports the server's response to rejected spans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Final, Literal, Protocol, TypeAlias, cast

from offbook.base.errors import MissingExtraError
from offbook.contracts import DeliveryError, RejectedError

from .trace_context import RemoteParent

Attribute: TypeAlias = str | bool | int | float | Sequence[str]
OtlpProtocol: TypeAlias = Literal["http/protobuf", "grpc"]
BATCH: Final = 400
"""The most spans per request."""
LARGE: Final = 9_000_000
"""The most characters of attributes per request; servers reject much larger bodies."""


@dataclass(frozen=True)
class OtlpSpan:
    """A span to send. Ids are integers, times are Unix nanoseconds; `error` is the message of a failed span.

    `shared`: further attributes, which `attributes` must not repeat. They are encoded once for consecutive spans that
    have the same object.
    """

    trace_id: int
    span_id: int
    parent: int | None
    name: str
    start: int
    end: int
    attributes: Mapping[str, Attribute]
    error: str | None = None
    client: bool = False  # a call to a model
    remote: RemoteParent | None = None  # for the root span: the app's span that it continues
    shared: Mapping[str, Attribute] = field(default_factory=dict[str, Attribute])


class SpanExport(Protocol):
    """An exporter that keeps the server's last response; see `otlp_export.SdkExport`."""

    status: int | None
    rejected: int

    def sent(self, spans: Sequence[OtlpSpan]) -> bool: ...

    def line(self) -> str: ...

    def close(self) -> None: ...


class OtlpSender:
    """Sends the spans of rollouts. `endpoint=None` and `headers=None` read OTEL_EXPORTER_OTLP_*; `timeout` is in seconds.
    `scope_name`, `scope`: name and attributes of the instrumentation scope.

    Raises MissingExtraError without the OpenTelemetry SDK.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
        scope: Mapping[str, str] | None = None,
        scope_name: str = "offbook",
        protocol: OtlpProtocol = "http/protobuf",
    ) -> None:
        try:
            export_class = import_module("offbook.tracing.otlp_export").SdkExport
        except ModuleNotFoundError as error:
            raise MissingExtraError("opentelemetry-exporter-otlp-proto-http", "otlp") from error
        self._export = cast(SpanExport, export_class(endpoint, headers, timeout, scope or {}, scope_name, protocol))

    def send(self, rollouts: Sequence[Sequence[OtlpSpan]]) -> None:
        """Send all rollouts. If the server refuses a batch as invalid (400), its rollouts are sent one by one.

        Raises RejectedError at the end if the server accepted all but some spans, DeliveryError at once if it accepts
        nothing. As the OTLP specification demands, what was rejected is not sent again.
        """
        rejected: list[str] = []
        for batch in _batches(rollouts):
            if self._accepted([span for spans in batch for span in spans], rejected):
                continue
            for spans in batch:
                if not self._accepted(spans, rejected):
                    rejected.append(f"trace {spans[0].trace_id:032x}: {self._export.line()}")
        if rejected:
            more = f", and {len(rejected) - 1} more" if len(rejected) > 1 else ""
            raise RejectedError(f"the server refused {rejected[0]}{more}")

    def _accepted(self, spans: Sequence[OtlpSpan], rejected: list[str]) -> bool:
        """Send one request and note the spans that it rejects. Returns False for 400, raises DeliveryError for other failures."""
        if not self._export.sent(spans):
            if self._export.status != 400:
                raise DeliveryError(self._export.line())
            return False
        if self._export.rejected:
            rejected.append(self._export.line())
        return True

    def probe(self) -> int | None:
        """Send an empty request; returns the HTTP status, None for gRPC. Raises ConnectionError without a response."""
        if not self._export.sent(()) and self._export.status is None:
            raise ConnectionError(self._export.line())
        return self._export.status

    def close(self) -> None:
        """Close the connections."""
        self._export.close()


def _batches(rollouts: Sequence[Sequence[OtlpSpan]]) -> list[list[Sequence[OtlpSpan]]]:
    batches: list[list[Sequence[OtlpSpan]]] = []
    spans = size = 0
    for rollout in rollouts:
        length = sum(_length(span.attributes) for span in rollout)
        length += len(rollout) * _length(rollout[0].shared) if rollout else 0
        if not batches or spans + len(rollout) > BATCH or size + length > LARGE:
            batches.append([])
            spans = size = 0
        batches[-1].append(rollout)
        spans, size = spans + len(rollout), size + length
    return batches


def _length(attributes: Mapping[str, Attribute]) -> int:
    return sum([len(value) for value in attributes.values() if isinstance(value, str)])
