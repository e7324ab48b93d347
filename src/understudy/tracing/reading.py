"""Rollouts for sinks, read from the servers that recorded them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence

from understudy.client.capture import histories_of
from understudy.client.http import Api
from understudy.types import Call, CallOutput, Message, RenderedHistory, Tool
from understudy.wire import CallTrace, RolloutTrace, TrajectoryQuery

PAGE = 100


async def read_groups(servers: Sequence[Api], groups: Iterable[str]) -> tuple[RolloutTrace, ...]:
    """The rollouts of these groups by group and index. Several servers each recorded the calls of their models."""
    found: list[RolloutTrace] = []
    for group in groups:
        several = [[each async for each in pages(api, TrajectoryQuery(group=group, limit=PAGE))] for api in servers]
        found += sorted(merged(several), key=lambda each: each.record.place.index or 0)
    return tuple(found)


async def read_run(servers: Sequence[Api], run: str) -> tuple[RolloutTrace, ...]:
    """Every rollout of a run, in the order in which they were finished."""
    several = [[each async for each in pages(api, TrajectoryQuery(run=run, limit=PAGE))][::-1] for api in servers]
    return tuple(merged(several))


async def pages(api: Api, query: TrajectoryQuery) -> AsyncIterator[RolloutTrace]:
    """What fits the query, the last finished first."""
    while True:
        page = await api.traces(query)
        for rollout in page.rollouts:
            yield rollout
        if page.next is None:
            return
        query = query.model_copy(update={"after": page.next})


def merged(several: Sequence[Sequence[RolloutTrace]]) -> list[RolloutTrace]:
    """The same rollouts of several servers as one each, with the calls of all."""
    first, *others = several
    if not others:
        return list(first)
    known: dict[str, RolloutTrace] = {}
    for rollout in (each for rollouts in several for each in rollouts):
        before = known.get(rollout.record.id)
        if before is not None:
            calls = {call.id: call for call in (*before.calls, *rollout.calls)}
            ordered = tuple(sorted(calls.values(), key=lambda call: (call.started_at, call.ended_at, call.id)))
            rollout = before.model_copy(update={"calls": ordered})
        known[rollout.record.id] = rollout
    return list(known.values())


def conversations(rollout: RolloutTrace) -> list[RenderedHistory]:
    """What was said, the longest conversation first: of the recorded calls, else the histories without recorded calls."""
    called = [_without_tokens(call) for call in rollout.calls if call.outputs]
    if not called:
        return list(rollout.record.histories)
    histories = histories_of(called, marked=False)
    found = [
        RenderedHistory(
            messages=tuple(dict[str, object](message) for message in history.messages()),
            tools=tuple(history.tools) if history.tools else None,
            targets=(),
        )
        for history in histories
    ]
    return sorted(found, key=lambda history: -len(history.messages))


def question_and_answer(rollout: RolloutTrace) -> tuple[tuple[Message, ...], Message | None]:
    """The messages that opened the rollout, and the last message of its model."""
    answered = [call for call in rollout.calls if call.outputs]
    if answered:
        opening = answered[0].messages
        return opening, max(answered, key=lambda call: call.ended_at).outputs[0].message
    for history in rollout.record.histories:
        at = min(history.targets, default=len(history.messages))
        return history.messages[:at], history.messages[max(history.targets)] if history.targets else None
    return (), None


def tools_of(rollout: RolloutTrace) -> tuple[Tool, ...]:
    """The tools of its first call that had any."""
    return next((call.tools for call in rollout.calls if call.tools), ())


def _without_tokens(call: CallTrace) -> Call:
    outputs = tuple(
        CallOutput(
            index=each.index,
            token_ids=(),
            logprobs=(),
            message=each.message,
            finish_reason=each.finish_reason,
            status=each.status,
            parse_failure=each.parse_failure,
        )
        for each in call.outputs
    )
    own = {name: getattr(call, name) for name in CallTrace.model_fields if name not in ("outputs", "prompt_tokens")}
    return Call(**own, prompt_ids=(), outputs=outputs)
