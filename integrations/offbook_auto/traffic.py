"""The recorded traffic of a route, as training and comparisons take it: what is held out, what is imitated, what is scored."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

from offbook.base.types import Json, Message
from offbook.base.wire import RolloutTrace, TrajectoryQuery
from offbook.client.connection.http import Api
from offbook.tracing.rollout_reader import pages

PAGE = 200


@dataclass(frozen=True)
class Thread:
    """A recorded thread. `question`: the last message of its user in the first call; `answer`: the last text of the last one.
    `own`: calls of the trained model whose tokens the server recorded."""

    id: str
    question: str
    answer: str
    reward: float | None
    own: bool

    def held_out(self, share: float) -> bool:
        """Whether it never trains. That is decided by a hash of its question alone, so it stays so in each run, and for
        each thread that begins with the same question.

        >>> Thread("a", "Where is box 1?", "", None, False).held_out(1.0)
        True
        """
        words = " ".join(self.question.lower().split())
        place = int.from_bytes(hashlib.sha256(f"held out\0{words}".encode()).digest()[:8])
        return place < share * 2**64

    def scenario(self) -> dict[str, Json]:
        """The scenario that asks the same. Its id is the thread's, so that the audit finds what was made from a thread."""
        return {"id": self.id, "prompt": self.question, "answer": self.answer, "score": self.reward}


async def newest_threads(api: Api, run: str, model: str, since: float, most: int) -> list[Thread]:
    """The threads of a run that ended since a time (unix seconds), the last begun first, without failed ones and those that
    ask nothing in words."""
    threads: list[Thread] = []
    async for rollout in pages(api, _finished(run)):
        thread = _thread(rollout, model)
        if thread is not None and rollout.record.ended_at >= since:
            threads.append(thread)
            if len(threads) == most:
                break
    return threads


async def threads_of(api: Api, ids: Collection[str], run: str, model: str) -> dict[str, Thread]:
    """Those of these threads that are still recorded, by id."""
    threads: dict[str, Thread] = {}
    async for rollout in pages(api, _finished(run)):
        thread = _thread(rollout, model) if rollout.record.id in ids else None
        if thread is not None:
            threads[thread.id] = thread
            if len(threads) == len(ids):
                break
    return threads


def _finished(run: str) -> TrajectoryQuery:
    return TrajectoryQuery(run=run, failed=False, limit=PAGE)


def _thread(rollout: RolloutTrace, model: str) -> Thread | None:
    calls = [call for call in rollout.calls if call.outputs and call.status.usable and not call.late]
    if not calls:
        return None
    questions = [text for message in calls[0].messages if message.get("role") == "user" and (text := _text(message))]
    if not questions:
        return None
    outside = {call.id for call in rollout.record.outside_calls}
    own = any(call.model == model and call.id not in outside for call in calls)
    return Thread(rollout.record.id, questions[-1], _text(calls[-1].outputs[0].message), rollout.record.reward, own)


def _text(message: Message) -> str:
    content: Json = message.get("content")
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    parts = [cast(dict[str, Json], part).get("text") for part in cast(list[Json], content) if isinstance(part, dict)]
    return " ".join(part for part in parts if isinstance(part, str))
