"""Results of tools: each belongs to one call, and they stand in the order of the calls.

Many chat templates write results without ids, so that a model reads the first result as the first call's. Clients that run tools
side by side send them in order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence

from offbook.base.errors import ConfigError
from offbook.base.types import Json, Message


def in_order_of_calls(messages: Sequence[Message], *, answered: bool = False) -> list[Message]:
    """The messages, with each run of results in the order of the calls that it answers. `answered`: the last calls need
    their results too.

    Raises ConfigError for a result without a call, a second one, and a call without a result, naming field and id.

    >>> call = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    >>> first, second = ({"role": "tool", "tool_call_id": name} for name in "ab")
    >>> in_order_of_calls([call, second, first]) == [call, first, second]
    True
    """
    ordered: list[Message] = []
    run = _Run()
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        if message["role"] == "tool":
            run.add(message, where)
            continue
        if run.waiting:
            raise ConfigError(f"{where}: the {message['role']} speaks before {run.missing} has a result")
        ordered += run.results
        run = _Run(message, where)
        ordered.append(message)
    if answered and run.waiting:
        raise ConfigError(
            f"messages: the conversation ends before {run.missing} has a result: send a message of the role `tool` for "
            "each call"
        )
    return ordered + run.results


class _Run:
    """The results after a message, by the calls in it. Calls and results without ids belong together in their order."""

    def __init__(self, message: Message | None = None, where: str = "") -> None:
        calls: list[Json] = (message or {}).get("tool_calls") or []
        if message is not None and calls and message["role"] != "assistant":
            raise ConfigError(f"{where}.tool_calls: only the assistant calls tools, this one is {message['role']!r}")
        self._results: list[Message | None] = [None] * len(calls)
        self.waiting: dict[str | None, list[int]] = {}
        """Places of the calls without a result, by id, the first one last."""
        for place in reversed(range(len(calls))):
            call_id = _text(calls[place].get("id"))
            if call_id is not None and call_id in self.waiting:
                raise ConfigError(f"{where}.tool_calls: the id {call_id!r} appears twice")
            self.waiting.setdefault(call_id, []).append(place)
        self._ids = frozenset(self.waiting)

    @property
    def results(self) -> list[Message]:
        """The results in the order of their calls."""
        return [result for result in self._results if result is not None]

    @property
    def missing(self) -> str:
        """The first call without a result, for an error."""
        call_id = min(self.waiting, key=lambda name: self.waiting[name][-1])
        return "each call of the assistant" if call_id is None else f"call {call_id!r} of the assistant"

    def add(self, result: Message, where: str) -> None:
        """Add a result. Raises ConfigError if no call waits for it."""
        call_id = _text(result.get("tool_call_id"))
        if not self._results:
            raise ConfigError(f"{where}: a result of a tool, but no call of the assistant before it waits for one")
        if call_id not in self.waiting:
            if call_id is not None and call_id in self._ids:
                raise ConfigError(f"{where}.tool_call_id: call {call_id!r} has a result already")
            names = ", ".join(map(repr, sorted(self.waiting, key=str)[:_MOST_NAMED])) or "each has one"
            raise ConfigError(f"{where}.tool_call_id: {call_id!r} is none of the calls that wait for a result: {names}")
        places = self.waiting[call_id]
        self._results[places.pop()] = result
        if not places:
            del self.waiting[call_id]


_MOST_NAMED = 10


def _text(call_id: Json) -> str | None:
    return None if call_id is None else str(call_id)
