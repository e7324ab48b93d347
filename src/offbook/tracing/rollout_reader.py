"""Reads rollouts for sinks from the servers that recorded them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from offbook.base.types import Message, RenderedHistory
from offbook.base.wire import ModelRecords, RolloutTrace, TrajectoryQuery
from offbook.client.connection.http import Api
from offbook.client.rollouts.capture import histories_of

PAGE = 100
"""Rollouts per request."""
GROUPS = 20
"""Groups per request."""


class StoredRecords(Protocol):
    """The records of a directory, read without a server."""

    place: str

    def rollouts(self, query: TrajectoryQuery) -> AsyncIterator[RolloutTrace]:
        """All rollouts that match the query, the last finished first."""
        ...

    async def models(self) -> list[ModelRecords]:
        """All models of the directory."""
        ...


async def read_groups(servers: Sequence[Api], groups: Sequence[str]) -> tuple[RolloutTrace, ...]:
    """The rollouts of these groups, by group and index. With several servers, the calls of all of them are merged."""
    rollouts: list[RolloutTrace] = []
    for start in range(0, len(groups), GROUPS):
        query = TrajectoryQuery(groups=tuple(groups[start : start + GROUPS]), limit=PAGE)
        several = [[rollout async for rollout in pages(api, query)] for api in servers]
        rollouts += merged(several)
    order = {group: number for number, group in enumerate(groups)}

    def place(rollout: RolloutTrace) -> tuple[int, int]:
        return order[str(rollout.record.place.group)], rollout.record.place.index or 0

    return tuple(sorted(rollouts, key=place))


async def read_run(servers: Sequence[Api], run: str) -> tuple[RolloutTrace, ...]:
    """All rollouts of a run, in the order in which they were finished."""
    several = [[rollout async for rollout in pages(api, TrajectoryQuery(run=run, limit=PAGE))][::-1] for api in servers]
    return tuple(merged(several))


async def pages(api: Api, query: TrajectoryQuery) -> AsyncIterator[RolloutTrace]:
    """The rollouts that match the query, the last finished first."""
    while True:
        page = await api.traces(query)
        for rollout in page.rollouts:
            yield rollout
        if page.next is None:
            return
        query = query.model_copy(update={"after": page.next})


def merged(several: Sequence[Sequence[RolloutTrace]]) -> list[RolloutTrace]:
    """Merge the rollouts of several servers by id, with the calls of all servers."""
    first, *others = several
    if not others:
        return list(first)
    known: dict[str, RolloutTrace] = {}
    for rollout in (item for rollouts in several for item in rollouts):
        before = known.get(rollout.record.id)
        if before is not None:
            calls = {call.id: call for call in (*before.calls, *rollout.calls)}
            ordered = tuple(sorted(calls.values(), key=lambda call: (call.started_at, call.ended_at, call.id)))
            rollout = before.model_copy(update={"calls": ordered})
        known[rollout.record.id] = rollout
    return list(known.values())


def conversations(rollout: RolloutTrace) -> list[RenderedHistory]:
    """The conversations of a rollout, the longest first: from its recorded calls, else its histories without calls."""
    called = [call.without_tokens() for call in rollout.calls if call.outputs]
    if not called:
        return list(rollout.record.histories)
    histories = histories_of(called, marked=False)
    rendered = [
        RenderedHistory(
            messages=tuple(dict[str, object](message) for message in history.messages()),
            tools=tuple(history.tools) if history.tools else None,
            targets=(),
        )
        for history in histories
    ]
    return sorted(rendered, key=lambda history: -len(history.messages))


def question_and_answer(rollout: RolloutTrace) -> tuple[tuple[Message, ...], Message | None]:
    """The messages before the rollout's first answer, and the last message of its model."""
    answered = [call for call in rollout.calls if call.outputs]
    if answered:
        opening = answered[0].messages
        return opening, max(answered, key=lambda call: call.ended_at).outputs[0].message
    for history in rollout.record.histories:
        first_target = min(history.targets, default=len(history.messages))
        return history.messages[:first_target], history.messages[max(history.targets)] if history.targets else None
    return (), None
