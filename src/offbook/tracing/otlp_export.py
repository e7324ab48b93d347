"""Sends OTLP requests with the OpenTelemetry SDK's exporters: their environment variables, TLS and retries.

The requests are encoded here, not by the SDK. Does not read or set the global tracer provider.
"""

from __future__ import annotations

import gzip
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import requests
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import offbook
from offbook.base.errors import MissingExtraError

from .otlp import Attribute, OtlpProtocol, OtlpSpan
from .otlp_request import Outgoing, RequestEncoder

GZIP_LEVEL = 6


class SdkExport:
    """One exporter that keeps the last response, which the SDK only logs: `status`, the number of `rejected` spans, and
    `line()` as text."""

    def __init__(
        self,
        endpoint: str | None,
        headers: Mapping[str, str] | None,
        timeout: float | None,
        scope: Mapping[str, str],
        scope_name: str,
        protocol: OtlpProtocol,
    ) -> None:
        self.status: int | None = None
        self.rejected = 0
        self._text = ""
        self._outgoing = Outgoing()
        own = dict(headers) if headers is not None else None
        self._exporter: SpanExporter = (
            _grpc(self._outgoing, endpoint, own, timeout)
            if protocol == "grpc"
            else OTLPSpanExporter(
                endpoint=endpoint, headers=own, timeout=timeout, compression=Compression.Gzip, session=self._session()
            )
        )
        resource = cast(Mapping[str, Attribute], Resource.create({"service.name": "offbook"}).attributes)
        self._encoder = RequestEncoder(resource, scope_name, offbook.__version__, scope)

    def sent(self, spans: Sequence[OtlpSpan]) -> bool:
        """Send the spans; returns whether the server accepted the request, perhaps without its `rejected` spans."""
        self.status, self._text, self.rejected = None, "", 0
        self._outgoing.request = self._encoder.request(spans)
        with _Quiet():
            done = self._exporter.export(()) is SpanExportResult.SUCCESS  # sends the request in `_outgoing`
        return done and (self.status is None or self.status < 300)

    def close(self) -> None:
        """Close the connections."""
        self._exporter.shutdown()

    def _session(self) -> requests.Session:
        session = _EncodedSession(self._outgoing)
        session.hooks["response"].append(self._seen)
        return session

    def line(self) -> str:
        """The last response as text."""
        if self.rejected:
            return f"{self.rejected} spans of a request: {self._text[:300]!r}"
        return (
            f"HTTP {self.status}: {self._text[:300]!r}" if self.status is not None else "no answer within the timeout"
        )

    def _seen(self, response: requests.Response, *_: object, **__: object) -> None:
        """Keep a response. A redirect that repeats the request without its body counts as the answer."""
        if response.request.method != "POST":
            return
        self.status, self._text = int(response.status_code), str(response.headers.get("location") or response.text)
        if self.status < 300:
            partial = _partial_success(response)
            self.rejected, self._text = int(partial.rejected_spans), str(partial.error_message)


def _partial_success(response: requests.Response) -> ExportTracePartialSuccess:
    """Read the partial success of a 2xx response, as protobuf or JSON.

    Servers also answer with bodies of their own: Langfuse with the job of its queue, others with plain text or nothing.
    Such a body says nothing about spans, so all of them were accepted.
    """
    answer, kind = ExportTraceServiceResponse(), response.headers.get("content-type", "")
    try:
        if "protobuf" in kind:
            answer.ParseFromString(response.content)
        elif "json" in kind:
            json_format.Parse(response.content, answer, ignore_unknown_fields=True)
    except (DecodeError, json_format.ParseError, UnicodeDecodeError):
        return ExportTracePartialSuccess()
    return answer.partial_success


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
