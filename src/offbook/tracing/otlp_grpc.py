"""The SDK's gRPC exporter for requests that are already encoded. Import it only for gRPC: it loads `grpc`."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan

from .otlp_request import Outgoing


class GrpcExport(OTLPSpanExporter):
    """Sends the outgoing request in place of the spans that `export` is called with."""

    def __init__(
        self, outgoing: Outgoing, endpoint: str | None, headers: dict[str, str] | None, timeout: float | None
    ) -> None:
        super().__init__(endpoint=endpoint, headers=headers, timeout=timeout)  # pyright: ignore[reportArgumentType]  # it asks for whole seconds and takes any
        self._outgoing = outgoing

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return self._outgoing.request
