"""The OpenTelemetry SDK's OTLP exporters. No global tracer provider is read or set."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

import understudy
from understudy.errors import MissingExtraError

from .otlp import OtlpProtocol, OtlpSpan


class SdkExport:
    """One exporter. `status`, and `line()` in words, are of the last answer, which the exporter itself only logs."""

    def __init__(
        self,
        endpoint: str | None,
        headers: Mapping[str, str] | None,
        timeout: float | None,
        resource: Mapping[str, str],
        protocol: OtlpProtocol,
    ) -> None:
        self.status: int | None = None
        self._text = ""
        self._rejected = 0
        own = dict(headers) if headers is not None else None
        self._exporter: SpanExporter = (
            _grpc(endpoint, own, timeout)
            if protocol == "grpc"
            else OTLPSpanExporter(
                endpoint=endpoint, headers=own, timeout=timeout, compression=Compression.Gzip, session=self._session()
            )
        )
        self._resource = Resource.create({"service.name": "understudy", **resource})
        self._scope = InstrumentationScope("understudy", understudy.__version__)

    def sent(self, spans: Sequence[OtlpSpan]) -> bool:
        """Whether the server took all of them."""
        self.status, self._text, self._rejected = None, "", 0
        with _Quiet():
            done = self._exporter.export([self._readable(span) for span in spans]) is SpanExportResult.SUCCESS
        return done and not self._rejected

    def close(self) -> None:
        """Close its connections."""
        self._exporter.shutdown()

    def _session(self) -> requests.Session:
        session = requests.Session()
        session.hooks["response"].append(self._seen)
        return session

    def line(self) -> str:
        if self._rejected:
            return f"the collector rejected {self._rejected} spans: {self._text}"
        return (
            f"HTTP {self.status}: {self._text[:300]!r}" if self.status is not None else "no answer within the timeout"
        )

    def _seen(self, response: Any, *_: object, **__: object) -> None:
        self.status = int(response.status_code)
        if response.ok:
            if response.content:
                partial = ExportTraceServiceResponse.FromString(response.content).partial_success
                self._rejected, self._text = int(partial.rejected_spans), str(partial.error_message)
        else:
            self._text = response.text

    def _readable(self, span: OtlpSpan) -> ReadableSpan:
        parent = None
        if span.parent is not None:
            parent = _context(span.trace_id, span.parent)
        elif span.remote is not None:
            parent = _context(span.trace_id, span.remote.span_id, remote=True)
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace_id, span.span_id),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            kind=SpanKind.CLIENT if span.client else SpanKind.INTERNAL,
            instrumentation_scope=self._scope,
            status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
            start_time=span.start,
            end_time=span.end,
        )


class _Quiet(logging.Filter):
    """The exporter logs each failure once more; ours says it once per kind."""

    LOGGER = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")

    def filter(self, record: logging.LogRecord) -> bool:
        return False

    def __enter__(self) -> None:
        self.LOGGER.addFilter(self)

    def __exit__(self, *_: object) -> None:
        self.LOGGER.removeFilter(self)


def _context(trace: int, span: int, *, remote: bool = False) -> SpanContext:
    return SpanContext(trace, span, is_remote=remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _grpc(endpoint: str | None, headers: dict[str, str] | None, timeout: float | None) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
    except ImportError as error:
        raise MissingExtraError("opentelemetry-exporter-otlp-proto-grpc", "otlp") from error
    return GrpcExporter(endpoint=endpoint, headers=headers, timeout=timeout)  # pyright: ignore[reportArgumentType]  # it asks for whole seconds and takes any
