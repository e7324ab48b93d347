"""The OpenTelemetry sink: sends rollouts, steps and alerts as spans in the GenAI semantic conventions to a collector."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final, cast

from offbook.base.errors import ConfigError
from offbook.base.types import CallTrace, Json, Message
from offbook.base.wire import RolloutTrace
from offbook.contracts import (
    Alert,
    EvaluationFinished,
    GroupsFinished,
    RunStarted,
    StepFinished,
    TraceSink,
    digest,
)

from .otlp import OtlpProtocol, OtlpSender, OtlpSpan
from .spans import (
    Attribute,
    Mask,
    SpanKind,
    TraceSpan,
    as_text,
    checked_rate,
    is_sampled,
    json_text,
    rollout_spans,
    span_id,
    trace_id,
    unmasked,
)
from .trace_context import remote_parent

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
CHECK_SECONDS: Final = 4.0
OPERATIONS: Final = {SpanKind.AGENT: "invoke_agent", SpanKind.GENERATION: "chat", SpanKind.TOOL: "execute_tool"}
NAMES: Final = {SpanKind.AGENT: "invoke_agent {}", SpanKind.TOOL: "execute_tool {}"}


class OtlpSink(TraceSink):
    """Sends spans over OTLP, by HTTP or gRPC. Without arguments it reads OpenTelemetry's environment variables.

    content: False sends no messages, arguments and results. sample_rate: the share of rollouts to send, from 0 to 1.
    timeout: seconds. Raises ConfigError without an endpoint, or for an invalid option.
    """

    name = "otlp"

    def __init__(
        self,
        endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        protocol: str | None = None,
        mask: Mask | None = None,
        sample_rate: float = 1.0,
        content: bool = True,
        timeout: float | None = None,
    ) -> None:
        if endpoint is None and not any(os.environ.get(name) for name in ENDPOINTS):
            raise ConfigError(f"sink otlp: set {ENDPOINTS[1]} to the collector's URL, such as http://localhost:4318")
        chosen = protocol or next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "http/protobuf")
        if chosen not in ("http/protobuf", "grpc"):
            raise ConfigError(f"sink otlp: {PROTOCOLS[1]} must be http/protobuf or grpc, got {chosen!r}")
        self._protocol: OtlpProtocol = chosen
        self._target = (endpoint, headers)
        self._sender = OtlpSender(endpoint, headers, protocol=self._protocol, timeout=timeout)
        self._mask = mask or unmasked
        self._rate = checked_rate(sample_rate, "sink otlp: sample_rate")
        self._content = content

    def check(self) -> None:
        """Send an empty request. Raises ConfigError for rejected credentials, ConnectionError without a response."""
        status = OtlpSender(*self._target, protocol=self._protocol, timeout=CHECK_SECONDS).probe()
        if status in (401, 403):
            raise ConfigError(f"sink otlp: the collector answered {status}: check OTEL_EXPORTER_OTLP_HEADERS")

    def run_started(self, event: RunStarted) -> None:
        named = {f"offbook.setting.{name}": as_text(value) for name, value in event.settings.items()}
        self._single(event.run, event.id, "offbook.run", event.at, named)

    def groups_finished(self, event: GroupsFinished) -> None:
        shown = [rollout for rollout in event.rollouts if is_sampled(rollout, self._rate)]
        self._sender.send([self._spans(rollout, event) for rollout in shown])

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
        trace = remote.trace_id if remote is not None else trace_id(rollout)
        common: dict[str, Attribute] = {
            "offbook.run": event.run,
            "offbook.split": event.split,
            "offbook.step": event.step,
        }
        spans = rollout_spans(rollout)
        outer = remote.span_id if remote is not None else None
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
                attributes |= _ends(self._mask(span.input), self._mask(span.output))
        elif span.call is not None:
            attributes |= call_attributes(span.call)
            if self._content:
                attributes |= self._messages(span.call)
        elif span.kind is SpanKind.TOOL:
            facts = span.facts or {}
            attributes |= {"gen_ai.tool.name": span.name, "gen_ai.tool.type": "function",
                      "gen_ai.tool.call.id": str(facts.get("tool_call_id")), "offbook.tool.timing": str(facts.get("timing"))}  # fmt: skip
            if self._content:
                attributes["gen_ai.tool.call.arguments"] = as_text(self._mask(span.input))
                attributes["gen_ai.tool.call.result"] = as_text(self._mask(span.output))
        elif span.facts:
            attributes |= {f"offbook.node.{name}": as_text(value) for name, value in span.facts.items()}
        return attributes

    def _messages(self, call: CallTrace) -> dict[str, Attribute]:
        attributes: dict[str, Attribute] = {
            "gen_ai.input.messages": json_text([as_parts(sent) for sent in _masked(call.messages, self._mask)]),
            "gen_ai.output.messages": json_text(
                [
                    as_parts(message) | {"finish_reason": output.finish_reason or "error"}
                    for output in call.outputs
                    for message in _masked([{"role": "assistant", **output.message}], self._mask)
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


def _masked(messages: Sequence[Message], mask: Mask) -> list[Message]:
    return [cast(Message, message) for message in cast(Sequence[Json], mask(list(messages)))]
