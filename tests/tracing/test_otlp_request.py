"""How spans become an OTLP request, and values the JSON of an attribute."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("opentelemetry.proto", reason="pip install -r requirements/test.txt")

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from offbook.tracing.otlp import OtlpSpan
from offbook.tracing.otlp_request import RequestEncoder
from offbook.tracing.spans import json_text
from offbook.tracing.trace_context import RemoteParent

SHARED = {"run": "run-1", "step": 3}
SPANS = [
    OtlpSpan(7, 1, None, "box", 10, 90, {"tags": ["a", "b"], "root": True}, remote=RemoteParent(7, 99), shared=SHARED),
    OtlpSpan(7, 2, 1, "chat", 20, 80, {"temperature": 0.5, "tokens": 12}, client=True, shared=SHARED),
    OtlpSpan(8, 3, None, "lost", 30, 40, {}, "TimeoutError: away", shared={"run": "run-2"}),
]


def context(trace: int, span: int, *, remote: bool = False) -> SpanContext:
    return SpanContext(trace, span, is_remote=remote, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def by_the_sdk(span: OtlpSpan, resource: Resource) -> ReadableSpan:
    parent = context(span.trace_id, span.parent) if span.parent is not None else None
    if span.remote is not None:
        parent = context(span.trace_id, span.remote.span_id, remote=True)
    return ReadableSpan(
        name=span.name,
        context=context(span.trace_id, span.span_id),
        parent=parent,
        resource=resource,
        attributes={**span.shared, **span.attributes},
        kind=SpanKind.CLIENT if span.client else SpanKind.INTERNAL,
        instrumentation_scope=InstrumentationScope("offbook", "1.2"),
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start,
        end_time=span.end,
    )


def test_a_request_is_what_the_sdk_would_send() -> None:
    resource = Resource({"service.name": "offbook"})
    ours = RequestEncoder({"service.name": "offbook"}, "offbook", "1.2").request(SPANS)
    theirs = encode_spans([by_the_sdk(span, resource) for span in SPANS])
    for span in theirs.resource_spans[0].scope_spans[0].spans:
        if not span.status.code:
            span.ClearField("status")  # UNSET, with or without the field
    assert ours == theirs


def test_no_spans_are_an_empty_request() -> None:
    assert RequestEncoder({}, "offbook", "1.2").request(()).SerializeToString() == b""


def test_any_value_becomes_json_and_half_a_surrogate_pair_is_escaped() -> None:
    assert json.loads(json_text({"é": [1, None, 0.5]})) == {"é": [1, None, 0.5]}
    assert json_text({"of": object}) == """{"of":"<class 'object'>"}"""
    assert json.loads(json_text({"text": "\ud800"})) == {"text": "\ud800"}
