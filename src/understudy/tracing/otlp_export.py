"""Sends OTLP requests with the OpenTelemetry SDK's exporters: their environment variables, TLS and retries.

The requests are encoded here, not by the SDK. Does not read or set the global tracer provider.
"""

from __future__ import annotations

import gzip
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import requests
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import understudy
from understudy.errors import MissingExtraError

from .otlp import Attribute, OtlpProtocol, OtlpSpan
from .otlp_request import Outgoing, RequestEncoder

GZIP_LEVEL = 6


class SdkExport:
    """One exporter that keeps the last response, which the SDK only logs: `status`, and `line()` as text."""

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
        self._outgoing = Outgoing()
        own = dict(headers) if headers is not None else None
        self._exporter: SpanExporter = (
            _grpc(self._outgoing, endpoint, own, timeout)
            if protocol == "grpc"
            else OTLPSpanExporter(
                endpoint=endpoint, headers=own, timeout=timeout, compression=Compression.Gzip, session=self._session()
            )
        )
        attributes = Resource.create({"service.name": "understudy", **resource}).attributes
        self._encoder = RequestEncoder(cast(Mapping[str, Attribute], attributes), "understudy", understudy.__version__)

    def sent(self, spans: Sequence[OtlpSpan]) -> bool:
        """Send the spans; returns whether the server accepted all of them."""
        self.status, self._text, self._rejected = None, "", 0
        self._outgoing.request = self._encoder.request(spans)
        with _Quiet():
            done = self._exporter.export(()) is SpanExportResult.SUCCESS  # sends the request in `_outgoing`
        return done and not self._rejected

    def close(self) -> None:
        """Close the connections."""
        self._exporter.shutdown()

    def _session(self) -> requests.Session:
        session = _EncodedSession(self._outgoing)
        session.hooks["response"].append(self._seen)
        return session

    def line(self) -> str:
        """The last response as text."""
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


class _EncodedSession(requests.Session):
    """Sends the outgoing request as the body, compressed, in place of what the SDK has encoded."""

    def __init__(self, outgoing: Outgoing) -> None:
        super().__init__()
        self._outgoing = outgoing

    def request(self, *args: Any, **options: Any) -> requests.Response:
        body = gzip.compress(self._outgoing.request.SerializeToString(), GZIP_LEVEL, mtime=0)
        return super().request(*args, **(options | {"data": body}))


class _Quiet(logging.Filter):
    """Suppresses the SDK's log of failures, which we report once per kind."""

    LOGGER = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")

    def filter(self, record: logging.LogRecord) -> bool:
        return False

    def __enter__(self) -> None:
        self.LOGGER.addFilter(self)

    def __exit__(self, *_: object) -> None:
        self.LOGGER.removeFilter(self)


def _grpc(
    outgoing: Outgoing, endpoint: str | None, headers: dict[str, str] | None, timeout: float | None
) -> SpanExporter:
    try:
        from .otlp_grpc import GrpcExport
    except ImportError as error:
        raise MissingExtraError("opentelemetry-exporter-otlp-proto-grpc", "otlp") from error
    return GrpcExport(outgoing, endpoint, headers, timeout)
