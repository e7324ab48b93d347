"""Sends spans over OTLP in batches with the OpenTelemetry SDK's exporters: their encoding, variables, TLS and retries.

Does not read or set the global tracer provider.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias
from urllib.parse import unquote

import offbook
from offbook.base.errors import MissingExtraError
from offbook.base.redaction import MARK, SHORTEST, redact
from offbook.contracts import DeliveryError, RejectedError

from .spans import Attribute

try:
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
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode
except ModuleNotFoundError as error:
    raise MissingExtraError("opentelemetry-exporter-otlp-proto-http", "otlp") from error

OtlpSpan: TypeAlias = ReadableSpan
OtlpProtocol: TypeAlias = Literal["http/protobuf", "grpc"]
HEADERS: Final = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
BATCH: Final = 400
"""The most spans per request."""
_REJECTED: Final = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403}
"""HTTP's status for gRPC's codes of rejected credentials."""
LARGE: Final = 9_000_000
"""The most characters of attributes per request; servers reject much larger bodies."""


class _Direct(requests.Session):
    """A session that follows no redirect: a repeated request would take spans and keys to another host."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        return None


class OtlpSender:
    """Sends the spans of rollouts. `endpoint=None` and `headers=None` read OTEL_EXPORTER_OTLP_*; `timeout` is in seconds.
    `scope_name`, `scope`: name and attributes of the instrumentation scope."""

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
        self._resource = Resource.create({"service.name": "offbook"})
        self._scope = InstrumentationScope(scope_name, offbook.__version__, attributes=scope)
        self._response: requests.Response | None = None
        self._refusal: tuple[str, str] | None = None
        own = dict(headers) if headers is not None else None
        self._sent_values = _header_values(headers)
        session = _Direct()
        session.hooks["response"].append(self._keep)
        self._exporter = (
            _grpc_exporter(endpoint, own, timeout)
            if protocol == "grpc"
            else OTLPSpanExporter(endpoint, headers=own, timeout=timeout, compression=Compression.Gzip, session=session)
        )

    def span(
        self,
        trace: int,
        span: int,
        parent: int | None,
        name: str,
        times: tuple[int, int],
        attributes: Mapping[str, Attribute],
        *,
        error: str | None = None,
        client: bool = False,
        remote: bool = False,
    ) -> OtlpSpan:
        """A span with these ids. `times`: start and end in Unix nanoseconds; `error`: the message of a failed span;
        `client`: a call to a model; `remote`: the parent is a span of the app."""
        return ReadableSpan(
            name,
            SpanContext(trace, span, is_remote=False),
            SpanContext(trace, parent, is_remote=remote) if parent is not None else None,
            self._resource,
            attributes,
            kind=SpanKind.CLIENT if client else SpanKind.INTERNAL,
            status=Status(StatusCode.UNSET) if error is None else Status(StatusCode.ERROR, error),
            start_time=times[0],
            end_time=times[1],
            instrumentation_scope=self._scope,
        )

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
                    context = spans[0].get_span_context()
                    assert context is not None, "span() sets it"
                    rejected.append(f"trace {context.trace_id:032x}: {self._answer()}")
        if rejected:
            more = f", and {len(rejected) - 1} more" if len(rejected) > 1 else ""
            raise RejectedError(f"the server refused {rejected[0]}{more}")

    def probe(self) -> int | None:
        """Send an empty request; returns the HTTP status, for gRPC that of its code: 401, 403, None for others. Raises
        ConnectionError without a response."""
        if not self._sent(()) and self._response is None:
            code = self._refusal[0] if self._refusal is not None else ""
            if code not in _REJECTED:
                raise ConnectionError(self._answer())
            return _REJECTED[code]
        return self._response.status_code if self._response is not None else None

    def _accepted(self, spans: Sequence[OtlpSpan], rejected: list[str]) -> bool:
        """Send one request and note the spans that it rejects. Returns False for 400, raises DeliveryError for other failures."""
        if not self._sent(spans):
            if self._response is None or self._response.status_code != 400:
                raise DeliveryError(self._answer())
            return False
        partial = _partial_success(self._response) if self._response is not None else None
        if partial is not None and partial.rejected_spans:
            rejected.append(f"{partial.rejected_spans} spans of a request: {partial.error_message[:300]!r}")
        return True

    def _sent(self, spans: Sequence[OtlpSpan]) -> bool:
        """Send one request; whether the server accepted it, perhaps without some spans. A redirect is no acceptance."""
        self._response = None
        with _Quiet() as quiet:
            done = self._exporter.export(spans) is SpanExportResult.SUCCESS
        self._refusal = quiet.refusal
        return done and (self._response is None or self._response.status_code < 300)

    def _keep(self, response: requests.Response, *_: object, **__: object) -> None:
        """Keep a response, which the SDK only logs."""
        self._response = response

    def _answer(self) -> str:
        """The last response as text, without secrets that the server repeats."""
        if self._refusal is not None:
            code, details = self._refusal
            return f"gRPC {code}: {self._shown(details)}"
        if self._response is None:
            return "no answer within the timeout"
        text = self._response.headers.get("location") or self._response.text
        return f"HTTP {self._response.status_code}: {self._shown(text)}"

    def _shown(self, text: str) -> str:
        """What a server said, without the headers that it was sent and other secrets."""
        for value in self._sent_values:
            text = text.replace(value, MARK)
        return repr(redact(text)[:300])


def _header_values(headers: Mapping[str, str] | None) -> list[str]:
    """The values of the headers that requests carry: those given, else those of OpenTelemetry's variables."""
    if headers is not None:
        values = list(headers.values())
    else:
        pairs = ",".join(os.environ.get(name, "") for name in HEADERS).split(",")
        values = [unquote(pair.partition("=")[2].strip()) for pair in pairs]
    return [value for value in values if len(value) >= SHORTEST]


def _grpc_exporter(endpoint: str | None, headers: dict[str, str] | None, timeout: float | None) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
    except ImportError as error:
        raise MissingExtraError("opentelemetry-exporter-otlp-proto-grpc", "otlp") from error
    return GrpcExporter(endpoint, headers=headers, timeout=timeout)


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


class _Quiet(logging.Filter):
    """Suppresses the SDK's log of failures, which we report once per kind. `refusal`: code and details of the last
    failure over gRPC, which the SDK tells nowhere else."""

    LOGGERS = tuple(
        logging.getLogger(f"opentelemetry.exporter.otlp.proto.{name}")
        for name in ("http.trace_exporter", "grpc.exporter")
    )

    def __init__(self) -> None:
        super().__init__()
        self.refusal: tuple[str, str] | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        values = list(record.args) if isinstance(record.args, tuple) else []
        code = next((value for value in values if type(value).__name__ == "StatusCode"), None)
        if code is not None:
            self.refusal = str(code).removeprefix("StatusCode."), str(values[-1])
        return False

    def __enter__(self) -> _Quiet:
        for logger in self.LOGGERS:
            logger.filters.insert(0, self)  # before the SDK's own, which drops what it has seen
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self.LOGGERS:
            logger.removeFilter(self)


def _batches(rollouts: Sequence[Sequence[OtlpSpan]]) -> list[list[Sequence[OtlpSpan]]]:
    batches: list[list[Sequence[OtlpSpan]]] = []
    spans = size = 0
    for rollout in rollouts:
        length = sum(
            len(value) for span in rollout for value in (span.attributes or {}).values() if isinstance(value, str)
        )
        if not batches or spans + len(rollout) > BATCH or size + length > LARGE:
            batches.append([])
            spans = size = 0
        batches[-1].append(rollout)
        spans, size = spans + len(rollout), size + length
    return batches
