"""OpenTelemetry: sends rollouts, steps and alerts as spans in the GenAI semantic conventions to a collector.

`OtlpSender` sends spans in batches with the OpenTelemetry SDK's exporters: their encoding, variables, TLS and retries. It does
not read or set the global tracer provider.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias, cast
from urllib.parse import unquote

import offbook
from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.redaction import MARK, SHORTEST, redact
from offbook.base.types import CallTrace, Json, Message
from offbook.base.wire import RolloutTrace
from offbook.contracts import (
    Alert,
    DeliveryError,
    EvaluationFinished,
    GroupsFinished,
    RejectedError,
    RunStarted,
    StepFinished,
    TraceSink,
    digest,
)

from .spans import (
    Attribute,
    SpanKind,
    TraceSpan,
    as_text,
    json_text,
    remote_parent,
    rollout_spans,
    span_id,
    trace_id,
)

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
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, Status, StatusCode
    from opentelemetry.trace import SpanKind as OtelKind
except ModuleNotFoundError as error:
    raise MissingExtraError("opentelemetry-exporter-otlp-proto-http", "otlp") from error

OtlpSpan: TypeAlias = ReadableSpan
SDK_LOGGER: Final = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
HEADERS: Final = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")
BATCH: Final = 400
"""The most spans per request."""
LARGE: Final = 9_000_000
"""The most characters of attributes per request; servers reject much larger bodies."""
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP: Final = "http/protobuf"
CHECK_SECONDS: Final = 4.0
OPERATIONS: Final = {SpanKind.AGENT: "invoke_agent", SpanKind.GENERATION: "chat", SpanKind.TOOL: "execute_tool"}
NAMES: Final = {SpanKind.AGENT: "invoke_agent {}", SpanKind.TOOL: "execute_tool {}"}


class OtlpSink(TraceSink):
    """Sends spans over OTLP by HTTP. Without arguments it reads OpenTelemetry's environment variables.

    content: False sends no messages, arguments and results. timeout: seconds. Raises ConfigError without an endpoint.
    """

    name = "otlp"

    def __init__(
        self,
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        content: bool = True,
        timeout: float | None = None,
    ) -> None:
        if endpoint is None and not any(os.environ.get(name) for name in ENDPOINTS):
            raise ConfigError(f"sink otlp: set {ENDPOINTS[1]} to the collector's URL, such as http://localhost:4318")
        if other := next((os.environ[name] for name in PROTOCOLS if os.environ.get(name, HTTP) != HTTP), None):
            raise ConfigError(f"sink otlp: {PROTOCOLS[1]} must be {HTTP} or unset, got {other!r}")
        self._target = (endpoint, headers)
        self._sender = OtlpSender(endpoint, headers, timeout=timeout)
        self._content = content

    def check(self) -> None:
        """Send an empty request. Raises ConfigError for rejected credentials, ConnectionError without a response."""
        status = OtlpSender(*self._target, timeout=CHECK_SECONDS).probe()
        if status in (401, 403):
            raise ConfigError(f"sink otlp: the collector answered {status}: check OTEL_EXPORTER_OTLP_HEADERS")

    def run_started(self, event: RunStarted) -> None:
        named = {f"offbook.setting.{name}": as_text(value) for name, value in event.settings.items()}
        self._single(event.run, event.id, "offbook.run", event.at, named)

    def groups_finished(self, event: GroupsFinished) -> None:
        self._sender.send([self._spans(rollout, event) for rollout in event.rollouts])

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        self._metrics(event.run, event.id, f"offbook.evaluation {event.split}", event.at, event.step, event.metrics)

    def step_finished(self, event: StepFinished) -> None:
        self._metrics(event.run, event.id, "offbook.step", event.at, event.step, event.metrics)

    def alert(self, event: Alert) -> None:
        facts = {
            "offbook.alert.value": event.value,
            "offbook.alert.limit": event.limit,
            "offbook.step": event.step,
        }
        self._single(event.run, event.id, f"offbook.alert {event.kind}", event.at, facts, event.message)

    def _metrics(self, run: str, id: str, name: str, sent_at: float, step: int, metrics: Mapping[str, float]) -> None:
        values = {f"offbook.metric.{key}": float(value) for key, value in metrics.items()}
        self._single(run, id, name, sent_at, {"offbook.step": step, **values})

    def _single(
        self, run: str, id: str, name: str, sent_at: float, facts: Mapping[str, Attribute], error: str | None = None
    ) -> None:
        trace, span, time = int(digest(id) * 2, 16), int(digest(id), 16), int(sent_at * 1e9)
        attributes = {"offbook.run": run, **facts}
        self._sender.send([[self._sender.span(trace, span, None, name, (time, time), attributes, error=error)]])

    def _spans(self, rollout: RolloutTrace, event: GroupsFinished) -> list[OtlpSpan]:
        remote = remote_parent(rollout.record.metadata)
        trace, outer = remote or (trace_id(rollout), None)
        common: dict[str, Attribute] = {
            "offbook.run": event.run,
            "offbook.split": event.split,
            "offbook.step": event.step,
        }
        spans = rollout_spans(rollout)
        return [
            self._sender.span(
                trace,
                span_id(rollout, span.key),
                span_id(rollout, span.parent) if span.parent is not None else outer,
                NAMES.get(span.kind, "{}").format(span.name),
                (span.start, span.end),
                common | self._attributes(span, rollout),
                error=span.error,
                client=span.kind is SpanKind.GENERATION,
                remote=span.parent is None,
            )
            for span in spans
        ]

    def _attributes(self, span: TraceSpan, rollout: RolloutTrace) -> dict[str, Attribute]:
        attributes: dict[str, Attribute] = {}
        if span.kind in OPERATIONS:
            attributes["gen_ai.operation.name"] = OPERATIONS[span.kind]
        if span.error is not None:
            attributes["error.type"] = span.error.split(":")[0][:200]
        if span.kind is SpanKind.AGENT:
            attributes |= _rollout_attributes(rollout, span.name)
            if self._content:
                attributes |= _ends(span.input, span.output)
        elif span.call is not None:
            attributes |= call_attributes(span.call)
            if self._content:
                attributes |= _messages(span.call)
        elif span.kind is SpanKind.TOOL:
            facts = span.facts or {}
            attributes |= {"gen_ai.tool.name": span.name, "gen_ai.tool.type": "function",
                      "gen_ai.tool.call.id": str(facts.get("tool_call_id")), "offbook.tool.timing": str(facts.get("timing"))}  # fmt: skip
            if self._content:
                attributes["gen_ai.tool.call.arguments"] = as_text(span.input)
                attributes["gen_ai.tool.call.result"] = as_text(span.output)
        elif span.facts:
            attributes |= {f"offbook.node.{name}": as_text(value) for name, value in span.facts.items()}
        return attributes


def _messages(call: CallTrace) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.input.messages": json_text([as_parts(message) for message in call.messages]),
        "gen_ai.output.messages": json_text(
            [
                as_parts({"role": "assistant", **output.message}) | {"finish_reason": output.finish_reason or "error"}
                for output in call.outputs
            ]
        ),
    }
    return attributes | ({"gen_ai.tool.definitions": json_text(call.tools)} if call.tools else {})


def call_attributes(call: CallTrace) -> dict[str, Attribute]:
    """The model, sampling settings and usage of a call as attributes."""
    attributes: dict[str, Attribute] = {
        "gen_ai.provider.name": "offbook",
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "offbook.call.step": call.step,
        "gen_ai.response.id": call.id,
        "gen_ai.request.temperature": call.sampling.temperature,
        "gen_ai.request.top_p": call.sampling.top_p,
        "gen_ai.usage.input_tokens": call.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(output.tokens for output in call.outputs),
        "gen_ai.response.finish_reasons": [output.finish_reason or "error" for output in call.outputs],
    }
    if call.cost is not None:
        attributes["offbook.call.cost"] = call.cost
    if call.sampling.top_k:
        attributes["gen_ai.request.top_k"] = call.sampling.top_k
    return attributes


def as_parts(message: Message) -> dict[str, Json]:
    """Convert an OpenAI message to the parts of the GenAI semantic conventions."""
    content, parts = message.get("content"), list[dict[str, Json]]()
    if message.get("role") == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": content})
    elif isinstance(content, str) and content:
        parts.append({"type": "text", "content": content})
    elif isinstance(content, list):
        parts += [_part(part) for part in cast(list[Json], content)]
    for call in cast(Sequence[Json], message.get("tool_calls") or ()):
        function: Mapping[str, Json] = call.get("function") or {}
        parts.append({"type": "tool_call", "id": call.get("id"), "name": function.get("name"),
                      "arguments": function.get("arguments")})  # fmt: skip
    return {"role": message.get("role"), "parts": parts}


def _rollout_attributes(rollout: RolloutTrace, name: str) -> dict[str, Attribute]:
    record, place = rollout.record, rollout.record.place
    attributes: dict[str, Attribute] = {"gen_ai.agent.name": name, "offbook.trajectory": record.id}
    for name, value in (("scenario", place.scenario), ("group", place.group), ("index", place.index)):
        if value is not None:
            attributes[f"offbook.{name}"] = value
    if record.reward is not None:
        attributes["offbook.reward"] = record.reward
    return attributes | {f"offbook.metric.{name}": value for name, value in record.metrics.items()}


def _ends(question: Json, answer: Json) -> dict[str, Attribute]:
    """The texts of a rollout's last question and its answer in the names of OpenInference, for Phoenix's list of traces."""
    ends: dict[str, Json] = {"input.value": question[-1] if question else None, "output.value": answer}
    return {
        name: text if isinstance(text := message.get("content"), str) else json_text(message)
        for name, message in ends.items()
        if message
    }


def _part(part: Json) -> dict[str, Json]:
    if isinstance(part, Mapping) and cast(Mapping[str, Json], part).get("type") == "text":
        return {"type": "text", "content": cast(Mapping[str, Json], part).get("text")}
    return {"type": "generic", "content": part}


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
    ) -> None:
        self._resource = Resource.create({"service.name": "offbook"})
        self._scope = InstrumentationScope(scope_name, offbook.__version__, attributes=scope)
        self._response: requests.Response | None = None
        own = dict(headers) if headers is not None else None
        self._sent_values = _header_values(headers)
        session = _Direct()
        session.hooks["response"].append(self._keep)
        self._exporter = OTLPSpanExporter(
            endpoint, headers=own, timeout=timeout, compression=Compression.Gzip, session=session
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
            kind=OtelKind.CLIENT if client else OtelKind.INTERNAL,
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

    def probe(self) -> int:
        """Send an empty request; returns the HTTP status. Raises ConnectionError without a response."""
        self._sent(())
        if self._response is None:
            raise ConnectionError(self._answer())
        return self._response.status_code

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
        SDK_LOGGER.filters.insert(0, _drop)  # before the SDK's own filter; failures are reported here, once per kind
        try:
            done = self._exporter.export(spans) is SpanExportResult.SUCCESS
        finally:
            SDK_LOGGER.removeFilter(_drop)
        return done and (self._response is None or self._response.status_code < 300)

    def _answer(self) -> str:
        """The last response as text, without the headers that it was sent and other secrets."""
        if self._response is None:
            return "no answer within the timeout"
        text = self._response.headers.get("location") or self._response.text
        for value in self._sent_values:
            text = text.replace(value, MARK)
        return f"HTTP {self._response.status_code}: {redact(text)[:300]!r}"

    def _keep(self, response: requests.Response, *_: object, **__: object) -> None:
        """Keep a response, which the SDK only logs."""
        self._response = response


def _drop(record: logging.LogRecord) -> bool:
    return False


def _header_values(headers: Mapping[str, str] | None) -> list[str]:
    """The values of the headers that requests carry: those given, else those of OpenTelemetry's variables."""
    if headers is not None:
        values = list(headers.values())
    else:
        pairs = ",".join(os.environ.get(name, "") for name in HEADERS).split(",")
        values = [unquote(pair.partition("=")[2].strip()) for pair in pairs]
    return [value for value in values if len(value) >= SHORTEST]


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
