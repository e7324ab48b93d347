"""Encodes spans as an OTLP request, in place of the SDK's encoder, which visits every attribute of every span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status

from .otlp import Attribute, OtlpSpan

LOCAL_PARENT = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
REMOTE_PARENT = LOCAL_PARENT | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK


@dataclass
class Outgoing:
    """The request that an exporter sends next."""

    request: ExportTraceServiceRequest = field(default_factory=ExportTraceServiceRequest)


class RequestEncoder:
    """Encodes the spans of one resource and scope."""

    def __init__(
        self,
        resource: Mapping[str, Attribute],
        scope: str,
        version: str,
        scope_attributes: Mapping[str, Attribute] = MappingProxyType({}),
    ) -> None:
        self._resource = Resource()
        for name, value in resource.items():
            _set(self._resource.attributes.add(key=name).value, value)
        self._scope = InstrumentationScope(name=scope, version=version)
        for name, value in scope_attributes.items():
            _set(self._scope.attributes.add(key=name).value, value)

    def request(self, spans: Sequence[OtlpSpan]) -> ExportTraceServiceRequest:
        """The request with these spans. Shared attributes of neighbouring spans are encoded once."""
        request = ExportTraceServiceRequest()
        if not spans:
            return request
        scope_spans = request.resource_spans.add(resource=self._resource).scope_spans.add(scope=self._scope)
        shared, template = spans[0].shared, _template(spans[0].shared)
        for span in spans:
            if span.shared is not shared:
                shared, template = span.shared, _template(span.shared)
            message = scope_spans.spans.add()
            message.CopyFrom(template)
            _fill(message, span)
        return request


def _template(shared: Mapping[str, Attribute]) -> Span:
    template = Span()
    _add(template, shared)
    return template


def _fill(message: Span, span: OtlpSpan) -> None:
    message.trace_id = span.trace_id.to_bytes(16, "big")
    message.span_id = span.span_id.to_bytes(8, "big")
    message.flags = LOCAL_PARENT
    if span.parent is not None:
        message.parent_span_id = span.parent.to_bytes(8, "big")
    elif span.remote is not None:
        message.parent_span_id = span.remote.span_id.to_bytes(8, "big")
        message.flags = REMOTE_PARENT
    message.name = span.name
    message.kind = Span.SPAN_KIND_CLIENT if span.client else Span.SPAN_KIND_INTERNAL
    message.start_time_unix_nano, message.end_time_unix_nano = span.start, span.end
    if span.error is not None:
        message.status.code, message.status.message = Status.STATUS_CODE_ERROR, span.error
    _add(message, span.attributes)


def _add(message: Span, attributes: Mapping[str, Attribute]) -> None:
    add = message.attributes.add
    for name, value in attributes.items():
        attribute = add()
        attribute.key = name
        if isinstance(value, str):
            attribute.value.string_value = value
        else:
            _set(attribute.value, value)


def _set(target: AnyValue, value: Attribute) -> None:
    if isinstance(value, str):
        target.string_value = value
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int):
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    else:
        for item in value:
            target.array_value.values.add().string_value = item
