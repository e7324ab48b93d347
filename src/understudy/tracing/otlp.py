"""Sends spans by OTLP: in batches, and with the server's answer for what it does not take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Literal, Protocol, TypeAlias, cast

from understudy.errors import MissingExtraError

from .trace_context import RemoteParent

Attribute: TypeAlias = str | bool | int | float | Sequence[str]
OtlpProtocol: TypeAlias = Literal["http/protobuf", "grpc"]
BATCH: Final = 400
"""Spans of one request."""
LARGE: Final = 9_000_000
"""Characters of one request's attributes; servers refuse bodies that are much larger."""


class DeliveryError(RuntimeError):
    """A server did not take what was sent; says how it answered."""


@dataclass(frozen=True)
class OtlpSpan:
    """A span as it is sent: ids as integers, times in unix nanoseconds, `error` a message where it failed."""

    trace_id: int
    span_id: int
    parent: int | None
    name: str
    start: int
    end: int
    attributes: Mapping[str, Attribute]
    error: str | None = None
    client: bool = False  # a call to a model
    remote: RemoteParent | None = None  # the root continues a span of the app's


class SpanExport(Protocol):
    """The SDK's exporter, and what the server answered last."""

    status: int | None

    def sent(self, spans: Sequence[OtlpSpan]) -> bool: ...

    def line(self) -> str: ...

    def close(self) -> None: ...


class OtlpSender:
    """Sends lists of spans, each list one rollout's. `endpoint=None`, `headers=None`: as OTEL_EXPORTER_OTLP_* say. Raises
    MissingExtraError without the OpenTelemetry SDK."""

    def __init__(
        self,
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float | None = None,
        resource: Mapping[str, str] | None = None,
        protocol: OtlpProtocol = "http/protobuf",
    ) -> None:
        try:
            made = import_module("understudy.tracing.otlp_export").SdkExport
        except ModuleNotFoundError as error:
            raise MissingExtraError("opentelemetry-exporter-otlp-proto-http", "otlp") from error
        self._export = cast(SpanExport, made(endpoint, headers, timeout, resource or {}, protocol))

    def send(self, rollouts: Sequence[Sequence[OtlpSpan]]) -> None:
        """Send every rollout. One that a server refuses (400) is left out, the others are sent. Raises DeliveryError
        after the last, or at once where the server takes nothing."""
        refused: list[str] = []
        for batch in _batches(rollouts):
            if self._export.sent([span for spans in batch for span in spans]):
                continue
            if self._export.status not in (200, 400):
                raise DeliveryError(self._export.line())
            for spans in batch:
                if not self._export.sent(spans):
                    refused.append(f"trace {spans[0].trace_id:032x}: {self._export.line()}")
        if refused:
            raise DeliveryError(f"{len(refused)} rollouts were refused, such as {refused[0]}")

    def probe(self) -> int | None:
        """Send an empty request -> the status of the answer, None by gRPC. Raises ConnectionError where none comes."""
        if not self._export.sent(()) and self._export.status is None:
            raise ConnectionError(self._export.line())
        return self._export.status

    def close(self) -> None:
        """Close its connections."""
        self._export.close()


def _batches(rollouts: Sequence[Sequence[OtlpSpan]]) -> list[list[Sequence[OtlpSpan]]]:
    batches: list[list[Sequence[OtlpSpan]]] = []
    spans = size = 0
    for rollout in rollouts:
        length = sum(len(value) for span in rollout for value in span.attributes.values() if isinstance(value, str))
        if not batches or spans + len(rollout) > BATCH or size + length > LARGE:
            batches.append([])
            spans = size = 0
        batches[-1].append(rollout)
        spans, size = spans + len(rollout), size + length
    return batches
