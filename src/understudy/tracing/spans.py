"""A rollout as a tree of spans: the agent, the app's nodes, its model calls and its tool calls, with true times.

Ids and times are functions of the record alone, so that a rollout exported again lands on itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, cast

from understudy.tool_runs import ToolRun
from understudy.types import CallStatus, Json, Message
from understudy.wire import CallTrace, RolloutTrace

from .reading import question_and_answer

MILLISECOND: Final = 1_000_000
"""In nanoseconds: tools sort spans by start, and equal milliseconds shuffle turns."""
ROOT: Final = "rollout"
RECORDED: Final = "recorded: when the tool ran"
SHIFTED: Final = "recorded: how long the tool ran; moved by {:.3f} s, as the clocks of client and server differ"
GAP: Final = "gap: from the end of the model call that asked for it to the start of the one that saw its result"
NO_RESULT: Final = "gap: no recorded model call saw its result"


class SpanKind(StrEnum):
    AGENT = "agent"  # the rollout
    NODE = "span"  # a node of the app, such as LangGraph's
    GENERATION = "generation"  # a model call
    TOOL = "tool"  # a tool call that the model asked for


@dataclass(frozen=True)
class TraceSpan:
    """One span. `key` is unique in its rollout, `parent` the key of another; times are unix nanoseconds."""

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
    facts: Mapping[str, Json] | None = None  # what else is known: of a tool call its id and how it was timed


def trace_id(rollout: RolloutTrace) -> int:
    """128 bits, of the rollout's id."""
    return _bits(16, rollout.record.id)


def span_id(rollout: RolloutTrace, key: str) -> int:
    """64 bits, of the rollout's id and the span's key."""
    return _bits(8, rollout.record.id, key)


def rollout_spans(rollout: RolloutTrace) -> list[TraceSpan]:
    """The spans of a rollout, parents before children, in strictly increasing milliseconds of start."""
    record = rollout.record
    opening, last = question_and_answer(rollout)
    error = f"{record.exception.type}: {record.exception.message}" if record.exception is not None else None
    starts = [record.started_at, *(call.started_at for call in rollout.calls)]
    ends = [record.ended_at, *(call.ended_at for call in rollout.calls)]
    root = TraceSpan(ROOT, None, str(record.place.scenario or ROOT), SpanKind.AGENT, _ns(min(starts)), _ns(max(ends)),
                     list(opening), last, error)  # fmt: skip
    nodes = _nodes(rollout.calls)
    inner = [*nodes.values(), *(_generation(call) for call in rollout.calls), *_tools(rollout, nodes)]
    return _increasing([root, *sorted(inner, key=lambda span: (span.start, _DEPTH[span.kind], span.key.count("|")))])


_DEPTH = {SpanKind.AGENT: 0, SpanKind.TOOL: 1, SpanKind.NODE: 2, SpanKind.GENERATION: 3}
"""Of two spans that start together: tool calls end what came before, a node holds the calls in it."""


def _generation(call: CallTrace) -> TraceSpan:
    answers = [output.message for output in call.outputs]
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
        answers[0] if len(answers) == 1 else answers or None,
        error,
        call,
    )


def _node_path(call: CallTrace) -> tuple[str, ...]:
    """Where in the app's graph: LangGraph's namespace `outer:id|inner:id`, else its node and step."""
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
    """A span for each node that made calls, and for those around it; from its first call to the end of its last."""
    found: dict[str, TraceSpan] = {}
    for call in calls:
        path = _node_path(call)
        for depth in range(1, len(path) + 1):
            key, start, end = _node_key(path[:depth]), _ns(call.started_at), _ns(call.ended_at)
            known = found.get(key)
            if known is not None:
                found[key] = replace(known, start=min(known.start, start), end=max(known.end, end))
                continue
            facts: dict[str, Json] = {"path": "|".join(path[:depth])}
            if depth == len(path) and call.origin is not None:
                facts |= call.origin.model_dump(mode="json", exclude_none=True, exclude={"unused"})
            parent = _node_key(path[: depth - 1]) if depth > 1 else ROOT
            name = path[depth - 1].split(":")[0] or "node"
            found[key] = TraceSpan(key, parent, name, SpanKind.NODE, start, end, facts=facts)
    return found


def _tools(rollout: RolloutTrace, nodes: Mapping[str, TraceSpan]) -> Iterator[TraceSpan]:
    """The tool calls of each model call, with the results that a later model call was sent, or that the adapter kept."""
    calls = rollout.calls
    every = [
        (at, f"{output.index}/{number}", cast(Mapping[str, Json], asked))
        for at, call in enumerate(calls)
        for output in call.outputs
        for number, asked in enumerate(cast(Sequence[Json], output.message.get("tool_calls") or ()))
    ]
    runs = _runs_of([str(asked.get("id")) for _, _, asked in every], rollout.record.tool_runs)
    for (at, key, asked), own in zip(every, runs, strict=True):
        call, path = calls[at], _node_path(calls[at])[:-1]
        found = next(_results(calls[at + 1 :], str(asked.get("id"))), None)
        parent = _node_key(path) if _node_key(path) in nodes else ROOT
        if not own:
            yield _tool(call, key, asked, found, parent)
        for number, run in enumerate(own):
            yield _timed(_tool(call, f"{key}/{number}" if number else key, asked, found, parent), run, call, found)


def _runs_of(ids: Sequence[str], runs: Sequence[ToolRun]) -> list[tuple[ToolRun, ...]]:
    """For each tool call its runs. Where a model used an id again, each call has the run of its turn; none where the numbers
    of calls and runs differ, as nobody knows which is whose."""
    found: list[tuple[ToolRun, ...]] = []
    for at, name in enumerate(ids):
        own = tuple(run for run in runs if run.tool_call_id == name)
        times = ids.count(name)
        if times > 1:
            earlier = ids[:at].count(name)
            own = own[earlier : earlier + 1] if len(own) == times else ()
        found.append(own)
    return found


def _timed(span: TraceSpan, run: ToolRun, call: CallTrace, found: tuple[CallTrace, Message] | None) -> TraceSpan:
    """The span with the times of a run. Two machines' clocks may differ: a run that began before the call that asked for it
    had ended, or that ended after the one that saw its result began, is moved between them."""
    late = max(call.ended_at - run.started_at, 0.0)
    early = max(run.ended_at - found[0].started_at, 0.0) if found else 0.0
    shift = late or -early
    facts = {**(span.facts or {}), "timing": SHIFTED.format(shift) if abs(shift) >= 0.001 else RECORDED}
    output = span.output if found else run.result
    start, end = _ns(run.started_at + shift), _ns(run.ended_at + shift)
    return replace(span, start=start, end=max(start, end), output=output, error=run.error, facts=facts)


def _tool(
    call: CallTrace, key: str, asked: Mapping[str, Json], found: tuple[CallTrace, Message] | None, parent: str
) -> TraceSpan:
    function = cast(Mapping[str, Json], asked.get("function") or {})
    facts: dict[str, Json] = {"tool_call_id": asked.get("id"), "timing": GAP if found else NO_RESULT}
    start = _ns(call.ended_at)
    return TraceSpan(
        f"tool/{call.id}/{key}",
        parent,
        str(function.get("name") or "tool"),
        SpanKind.TOOL,
        start,
        max(start, _ns(found[0].started_at)) if found else start,
        _parsed(function.get("arguments")),
        found[1].get("content") if found else None,
        facts=facts,
    )


def _results(later: Sequence[CallTrace], tool_call_id: str) -> Iterator[tuple[CallTrace, Message]]:
    for call in later:
        for message in reversed(call.messages):
            if message.get("role") == "tool" and message.get("tool_call_id") == tool_call_id:
                yield call, message


def _parsed(arguments: Json) -> Json:
    """A tool call's arguments as an object; text that is no JSON stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _increasing(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """Each starts at least a millisecond after the one before; none ends before it starts, and the root ends last."""
    moved: list[TraceSpan] = []
    for span in spans:
        earliest = moved[-1].start // MILLISECOND * MILLISECOND + MILLISECOND if moved else 0
        start = max(span.start, earliest)
        moved.append(replace(span, start=start, end=max(span.end, start)))
    ends = {span.key: span.end for span in moved}
    for span in reversed(moved):  # children come after their parents
        if span.parent is not None:
            ends[span.parent] = max(ends[span.parent], ends[span.key])
    return [replace(span, end=ends[span.key]) for span in moved]


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000) * 1_000


def _bits(size: int, *parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(("understudy", *parts)).encode()).digest()[:size], "big") or 1
