"""How spans are sent over OTLP, and values as the JSON of an attribute."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("opentelemetry.proto", reason="pip install -r requirements/test.txt")

import requests
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import Span, SpanFlags, Status

from offbook import __version__
from offbook.contracts import DeliveryError
from offbook_sinks.otlp_sink import BATCH, OtlpSender
from offbook_sinks.spans import json_text
from tests.fakes.scripted_api import Reply, scripted_api
from tests.fakes.trace_server import trace_server


def test_a_span_keeps_its_ids_times_kind_and_error() -> None:
    sender = OtlpSender("http://localhost:4318/v1/traces", scope={"key": "pk-1"})
    own = sender.span(7, 1, 99, "box", (10, 90), {"tags": ["a", "b"], "root": True}, remote=True)
    call = sender.span(7, 2, 1, "chat", (20, 80), {"temperature": 0.5, "tokens": 12}, client=True)
    lost = sender.span(8, 3, None, "lost", (30, 40), {}, error="TimeoutError: away")
    [resource] = encode_spans([own, call, lost]).resource_spans
    [scope] = resource.scope_spans
    named = {attribute.key: attribute.value.string_value for attribute in resource.resource.attributes}
    assert named["service.name"] == "offbook"
    assert (scope.scope.name, scope.scope.version, scope.scope.attributes[0].key) == ("offbook", __version__, "key")
    first, second, third = scope.spans
    assert (first.trace_id, first.span_id, first.parent_span_id) == (
        bytes(15) + b"\7",
        bytes(7) + b"\1",
        bytes(7) + b"c",
    )
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (10, 90)
    assert first.flags & SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    assert not second.flags & SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    assert (first.kind, second.kind) == (Span.SPAN_KIND_INTERNAL, Span.SPAN_KIND_CLIENT)
    assert (second.status.code, third.status.code) == (Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR)
    assert (third.status.message, third.parent_span_id) == ("TimeoutError: away", b"")
    values = {attribute.key: attribute.value for span in (first, second) for attribute in span.attributes}
    assert [item.string_value for item in values["tags"].array_value.values] == ["a", "b"]
    assert (values["root"].bool_value, values["temperature"].double_value, values["tokens"].int_value) == (
        True,
        0.5,
        12,
    )


def test_requests_have_whole_rollouts_and_at_most_so_many_spans() -> None:
    with trace_server(langfuse=False) as server:
        sender = OtlpSender(server.endpoint)
        rollouts = [
            [sender.span(trace, span, None, "s", (span, span), {}) for span in range(1, 151)] for trace in (1, 2, 3)
        ]
        sender.send(rollouts)
        large = {"text": "x" * 5_000_000}
        sender.send([[sender.span(trace, 1, None, "s", (1, 1), large)] for trace in (4, 5)])
        assert len(server.requests) == 4 and len(server.spans) == 452
    assert 2 * 150 <= BATCH < 3 * 150


def test_any_value_becomes_json_and_half_a_surrogate_pair_is_escaped() -> None:
    assert json.loads(json_text({"é": [1, None, 0.5]})) == {"é": [1, None, 0.5]}
    assert json_text({"of": object}) == """{"of":"<class 'object'>"}"""
    assert json.loads(json_text({"text": "\ud800"})) == {"text": "\ud800"}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_span_or_key_goes_where_a_collector_redirects_to(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    request = requests.Session.request

    def as_older_exporters(*asked: Any, **options: Any) -> requests.Response:
        return request(*asked, **options | {"allow_redirects": True})  # exporter 1.40 does; 1.45 follows none by itself

    monkeypatch.setattr(requests.Session, "request", as_older_exporters)
    with scripted_api() as other, scripted_api(lambda asked: Reply(status, location=f"{other.url}/taken")) as api:
        sender = OtlpSender(f"{api.url}/v1/traces", {"x-api-key": "secret"}, timeout=5.0)
        with pytest.raises(DeliveryError, match=f"HTTP {status}: .*{other.url}/taken"):
            sender.send([[sender.span(7, 1, None, "s", (1, 2), {})]])
    assert other.asked == []


def test_an_http_collectors_refusal_is_told_without_the_key_that_it_repeats() -> None:
    with scripted_api(lambda asked: Reply(401, json={"error": "no such key: my-planted-word"})) as api:
        sender = OtlpSender(f"{api.url}/v1/traces", {"x-api-key": "my-planted-word"}, timeout=5.0)
        with pytest.raises(DeliveryError, match=r"HTTP 401: .*redacted key") as told:
            sender.send([[sender.span(7, 1, None, "s", (1, 2), {})]])
    assert "planted" not in str(told.value)
