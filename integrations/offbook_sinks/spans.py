"""Converts a rollout to a tree of spans: the agent, the app's nodes, model calls and tool calls, with recorded times.

Ids and times depend on the record only, so a rollout that is exported again replaces itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, TypeAlias, cast

from pydantic_core import PydanticSerializationError, to_json

from offbook.base.json_files import parse_json
from offbook.base.types import (
    CallStatus,
    CallTrace,
    Json,
    Message,
    ToolRun,
)
from offbook.base.wire import RolloutTrace
from offbook.tracing.rollout_reader import question_and_answer

MILLISECOND: Final = 1_000_000
"""In nanoseconds. Tools sort spans by start in milliseconds, so equal milliseconds would shuffle turns."""
ROOT: Final = "rollout"
RECORDED: Final = "recorded: when the tool ran"
SHIFTED: Final = "recorded: how long the tool ran; moved by {:.3f} s, as the clocks of client and server differ"
GAP: Final = "gap: from the end of the model call that asked for it to the start of the one that saw its result"
NO_RESULT: Final = "gap: no recorded model call saw its result"

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
"""The W3C Trace Context of the span in which a rollout ran."""

Attribute: TypeAlias = str | bool | int | float | Sequence[str]
"""A value of an OpenTelemetry attribute."""


class SpanKind(StrEnum):
    """What a span stands for."""

    AGENT = "agent"  # the rollout
    NODE = "span"  # a node of the app, such as LangGraph's
    GENERATION = "generation"  # a model call
    TOOL = "tool"  # a tool call that the model asked for


@dataclass(frozen=True)
class TraceSpan:
    """One span. `key` is unique in the rollout, `parent` is the key of another span; times are Unix nanoseconds."""

    key: str
    parent: str | None
    name: str
    kind: SpanKind
    start: int
    end: int
    input: Json = None
    output: Json = None
    error: str | None = None
    call: CallTrace | None = None
    facts: Mapping[str, Json] | None = None  # further facts, such as a tool call's id and how it was timed


def trace_id(rollout: RolloutTrace) -> int:
    """The 128-bit trace id, derived from the rollout's id."""
    return _bits(16, rollout.record.id)


def span_id(rollout: RolloutTrace, key: str) -> int:
    """The 64-bit span id, derived from the rollout's id and the span's key."""
    return _bits(8, rollout.record.id, key)


def rollout_spans(rollout: RolloutTrace) -> list[TraceSpan]:
    """The spans of a rollout, parents before children, with strictly increasing start milliseconds.

    The root is named after the app (`metadata["app"]`), else after the model.
    """
    record = rollout.record
    opening, last = question_and_answer(rollout)
    error = f"{record.exception.type}: {record.exception.message}" if record.exception is not None else None
    starts = [record.started_at, *(call.started_at for call in rollout.calls)]
    ends = [record.ended_at, *(call.ended_at for call in rollout.calls)]
    name = str(record.metadata.get("app") or record.model)
    root = TraceSpan(ROOT, None, name, SpanKind.AGENT, _ns(min(starts)), _ns(max(ends)), list(opening), last, error)
    nodes = _nodes(rollout.calls)
    inner = [*nodes.values(), *(_generation(call) for call in rollout.calls), *_tools(rollout, nodes)]
    return _increasing([root, *sorted(inner, key=lambda span: (span.start, _DEPTH[span.kind], span.key.count("|")))])


_DEPTH = {SpanKind.AGENT: 0, SpanKind.TOOL: 1, SpanKind.NODE: 2, SpanKind.GENERATION: 3}
"""Order of spans that start together: tool calls belong to the previous turn, and a node contains its calls."""


def _generation(call: CallTrace) -> TraceSpan:
    failed = call.status in (CallStatus.FAILED, CallStatus.CANCELLED)
    error = (call.error or f"the call was {call.status.value}") if failed else None
    path = _node_path(call)
    return TraceSpan(
        f"call/{call.id}",
        _node_key(path) if path else ROOT,
        f"chat {call.model}",
        SpanKind.GENERATION,
        _ns(call.started_at),
        _ns(call.ended_at),
        list(call.messages),
        _answer(call),
        error,
        call,
    )


def _answer(call: CallTrace) -> Json:
    """The call's message; a list if it has several choices, None without any."""
    answers: list[Json] = [output.message for output in call.outputs]
    return answers[0] if len(answers) == 1 else answers or None


def _node_path(call: CallTrace) -> tuple[str, ...]:
    """The call's path in the app's graph: LangGraph's namespace `outer:id|inner:id`, else its node and step."""
    origin = call.origin
    if origin is None:
        return ()
    if origin.namespace:
        return tuple(origin.namespace.split("|"))
    if origin.node:
        return (f"{origin.node}:{'' if origin.step is None else origin.step}",)
    return (f"{origin.agent}:",) if origin.agent else ()


def _node_key(path: Sequence[str]) -> str:
    return "node/" + "|".join(path)


def _nodes(calls: Sequence[CallTrace]) -> dict[str, TraceSpan]:
    """A span per node with calls, and per enclosing node, from its first call's start to its last call's end.

    Its input is the last message that its first call was sent, its output the answer of its last call.
    """
    spans: dict[str, TraceSpan] = {}
    for call in calls:
        path = _node_path(call)
        for depth in range(1, len(path) + 1):
            key, start, end = _node_key(path[:depth]), _ns(call.started_at), _ns(call.ended_at)
            known = spans.get(key)
            if known is not None:
                spans[key] = replace(
                    known, start=min(known.start, start), end=max(known.end, end), output=_answer(call) or known.output
                )
                continue
            facts: dict[str, Json] = {"path": "|".join(path[:depth])}
            if depth == len(path) and call.origin is not None:
                facts |= call.origin.model_dump(mode="json", exclude_none=True, exclude={"unused"})
            parent = _node_key(path[: depth - 1]) if depth > 1 else ROOT
            name = path[depth - 1].split(":")[0] or "node"
            sent = call.messages[-1] if call.messages else None
            spans[key] = TraceSpan(key, parent, name, SpanKind.NODE, start, end, sent, _answer(call), facts=facts)
    return spans


def _tools(rollout: RolloutTrace, nodes: Mapping[str, TraceSpan]) -> Iterator[TraceSpan]:
    """The tool calls of all model calls, with results from a later model call's messages or from the adapter."""
    calls = rollout.calls
    every = [
        (call_index, f"{output.index}/{number}", cast(Mapping[str, Json], tool_call))
        for call_index, call in enumerate(calls)
        for output in call.outputs
        for number, tool_call in enumerate(cast(Sequence[Json], output.message.get("tool_calls") or ()))
    ]
    runs = _runs_of([str(tool_call.get("id")) for _, _, tool_call in every], rollout.record.tool_runs)
    for (call_index, key, tool_call), own in zip(every, runs, strict=True):
        call, path = calls[call_index], _node_path(calls[call_index])[:-1]
        result = next(_results(calls[call_index + 1 :], str(tool_call.get("id"))), None)
        parent = _node_key(path) if _node_key(path) in nodes else ROOT
        if not own:
            yield _tool(call, key, tool_call, result, parent)
        for number, run in enumerate(own):
            yield _timed(
                _tool(call, f"{key}/{number}" if number else key, tool_call, result, parent), run, call, result
            )


def _runs_of(ids: Sequence[str], runs: Sequence[ToolRun]) -> list[tuple[ToolRun, ...]]:
    """The runs of every tool call.

    If the model used an id more than once, the runs are assigned in order; none if the numbers of calls and runs differ.
    """
    runs_by_call: list[tuple[ToolRun, ...]] = []
    for index, name in enumerate(ids):
        own = tuple(run for run in runs if run.tool_call_id == name)
        times = ids.count(name)
        if times > 1:
            earlier = ids[:index].count(name)
            own = own[earlier : earlier + 1] if len(own) == times else ()
        runs_by_call.append(own)
    return runs_by_call


def _timed(span: TraceSpan, run: ToolRun, call: CallTrace, result: tuple[CallTrace, Message] | None) -> TraceSpan:
    """The span with the times of a tool run.

    The clocks of client and server may differ. A run that overlaps the call that requested it, or the call that saw its
    result, is moved between the two.
    """
    late = max(call.ended_at - run.started_at, 0.0)
    early = max(run.ended_at - result[0].started_at, 0.0) if result else 0.0
    shift = late or -early
    facts = {**(span.facts or {}), "timing": SHIFTED.format(shift) if abs(shift) >= 0.001 else RECORDED}
    output = span.output if result else run.result
    start, end = _ns(run.started_at + shift), _ns(run.ended_at + shift)
    return replace(span, start=start, end=max(start, end), output=output, error=run.error, facts=facts)


def _tool(
    call: CallTrace, key: str, tool_call: Mapping[str, Json], result: tuple[CallTrace, Message] | None, parent: str
) -> TraceSpan:
    function = cast(Mapping[str, Json], tool_call.get("function") or {})
    facts: dict[str, Json] = {"tool_call_id": tool_call.get("id"), "timing": GAP if result else NO_RESULT}
    start = _ns(call.ended_at)
    return TraceSpan(
        f"tool/{call.id}/{key}",
        parent,
        str(function.get("name") or "tool"),
        SpanKind.TOOL,
        start,
        max(start, _ns(result[0].started_at)) if result else start,
        _parsed(function.get("arguments")),
        result[1].get("content") if result else None,
        facts=facts,
    )


def _results(later: Sequence[CallTrace], tool_call_id: str) -> Iterator[tuple[CallTrace, Message]]:
    for call in later:
        for message in reversed(call.messages):
            if message.get("role") == "tool" and message.get("tool_call_id") == tool_call_id:
                yield call, message


def _parsed(arguments: Json) -> Json:
    """A tool call's arguments as an object; text that is not JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments)
    except ValueError:
        return arguments


def _increasing(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """Shift spans so that each starts at least a millisecond after the previous one, and parents end after their children."""
    starts: list[int] = []
    ends: dict[str, int] = {}
    for span in spans:
        earliest = starts[-1] // MILLISECOND * MILLISECOND + MILLISECOND if starts else 0
        starts.append(max(span.start, earliest))
        ends[span.key] = max(span.end, starts[-1])
    for span in reversed(spans):  # children come after their parents
        if span.parent is not None:
            ends[span.parent] = max(ends[span.parent], ends[span.key])
    return [
        span if (span.start, span.end) == (start, ends[span.key]) else replace(span, start=start, end=ends[span.key])
        for span, start in zip(spans, starts, strict=True)
    ]


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000) * 1_000


def _bits(size: int, *parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(("offbook", *parts)).encode()).digest()[:size], "big") or 1


def as_text(value: Json) -> str:
    """Texts as they are, anything else as JSON."""
    return value if isinstance(value, str) else json_text(value)


def json_text(value: Json) -> str:
    """The value as JSON. What JSON cannot express becomes its `repr`; text that is not valid Unicode is escaped."""
    try:
        return to_json(value, fallback=repr).decode()
    except PydanticSerializationError:  # half of a surrogate pair
        return json.dumps(value, default=repr)


def remote_parent(metadata: Mapping[str, Json]) -> tuple[int, int] | None:
    """Trace id and span id of the app's span that a rollout continues; None without a valid `traceparent` in the metadata."""
    match = _TRACEPARENT.fullmatch(str(metadata.get("traceparent", "")))
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return int(match[1], 16), int(match[2], 16)
