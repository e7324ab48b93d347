"""What was sampled, for clients that send it back in another form: the record is where answers are looked up.

Many clients keep the arguments of a tool call as an object and send them back written anew: those of most APIs, and of chat
completions LangChain's and Vercel's. A prompt with other spaces than the sampled ones would not extend the one before.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import cast

from offbook.base.types import Call, Json, Message
from offbook.openai_dialect.tool_arguments import arguments_object

from ..records.store import Store

MAX_TRAJECTORIES = 1_000
MAX_CHARACTERS = 2**26
"""Trajectories in memory, and the arguments of all of them; the calls of another one are read from the records again."""


class TrajectoryCalls:
    """The sampled tool calls of one trajectory."""

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[Json, str]] = {}
        self._by_value: dict[tuple[str, str], tuple[str, str]] = {}
        self.characters = 0
        """Characters of all arguments."""

    def add(self, message: Message) -> None:
        """Add the tool calls of a recorded answer."""
        for item in cast(Sequence[dict[str, Json]], message.get("tool_calls") or ()):
            raw, call_id = str(item["function"]["arguments"]), str(item["id"])
            value = arguments_object(raw)
            self._by_id[call_id] = (value, raw)
            self._by_value[item["function"]["name"], _key(value)] = (call_id, raw)
            self.characters += len(raw)

    def restore(self, call_id: str | None, name: str, value: Json) -> tuple[str, str] | None:
        """The id and the sampled text of the arguments `value`, by the call's id or, where clients drop ids, by its name.

        None if they were not sampled here, or the client changed them.
        """
        if call_id is not None:
            known = self._by_id.get(call_id)
            return (call_id, known[1]) if known is not None and known[0] == value else None
        return self._by_value.get((name, _key(value)))

    def restored(self, messages: Sequence[Message]) -> list[Message]:
        """A chat's messages with the sampled text of every tool call that its client wrote anew."""
        return [
            {**message, "tool_calls": [self._restored(call) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else message
            for message in messages
        ]

    def _restored(self, call: dict[str, Json]) -> dict[str, Json]:
        function = call["function"]
        sent = function.get("arguments")
        value = arguments_object(sent) if isinstance(sent, str) else sent  # some clients send the object itself
        known = self.restore(call.get("id"), function["name"], value)
        return call if known is None else {**call, "function": {**function, "arguments": known[1]}}


def _key(value: Json) -> str:
    return json.dumps(value, sort_keys=True)


class SampledCalls:
    """The sampled tool calls of the trajectories that are asked for, and every recorded call by its id."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._only: str | None = None
        self._trajectories: OrderedDict[str, tuple[TrajectoryCalls, asyncio.Task[None]]] = OrderedDict()

    def add(self, call: Call) -> None:
        """Add a call that was just recorded."""
        if (entry := self._trajectories.get(call.trajectory_id)) is not None:
            for output in call.outputs:
                entry[0].add(output.message)

    async def of(self, trajectory_id: str | None) -> TrajectoryCalls:
        """The tool calls of a trajectory, from the records at its first use; none without a trajectory. Raises StoreError."""
        if trajectory_id is None:
            return TrajectoryCalls()
        if trajectory_id not in self._trajectories:
            calls = TrajectoryCalls()  # calls that are recorded meanwhile are added to it
            self._trajectories[trajectory_id] = (calls, asyncio.create_task(self._read(trajectory_id, calls)))
        self._trajectories.move_to_end(trajectory_id)
        self._shrink()
        calls, reading = self._trajectories[trajectory_id]
        try:
            await asyncio.shield(reading)
        except Exception:
            self._trajectories.pop(trajectory_id, None)
            raise
        return calls

    async def call(self, call_id: str) -> Call | None:
        """A recorded call; None if there is none with this id. Raises StoreError."""
        call = await self._store.call(call_id)
        return call if call is None or self._only in (None, call.trajectory_id) else None

    def within(self, trajectory_id: str | None) -> SampledCalls:
        """The same, in which calls of other trajectories are not found; None: all are."""
        limited = copy.copy(self)
        limited._only = trajectory_id
        return limited

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Forget trajectories whose records are deleted."""
        for name in trajectory_ids:
            self._trajectories.pop(name, None)

    def _shrink(self) -> None:
        """Forget the trajectories that were asked for longest ago, beyond the limits."""
        characters = sum(calls.characters for calls, _ in self._trajectories.values())
        while len(self._trajectories) > 1 and (
            len(self._trajectories) > MAX_TRAJECTORIES or characters > MAX_CHARACTERS
        ):
            characters -= self._trajectories.popitem(last=False)[1][0].characters

    async def _read(self, trajectory_id: str, calls: TrajectoryCalls) -> None:
        for message in await self._store.sampled_messages(trajectory_id):
            calls.add(message)
