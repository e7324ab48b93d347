"""Chooses the member of a pool for a call, so that turns of a trajectory and rollouts of a scenario find their prefix cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import orjson

from offbook.base.types import Json

from .supervised import SupervisedSampler

SLACK = 1.25
"""A new trajectory goes elsewhere if its member would have more than this multiple of an equal share of the calls in flight."""
MAX_TRAJECTORIES = 20_000
"""Trajectories whose member is remembered; the one used least recently is forgotten first, and goes by its opening again."""


class Routes:
    """Which member answers a call.

    A trajectory stays on its member while that answers calls. A member that sleeps loses its trajectories: its cache is gone.
    A new trajectory, and a call without one, goes by rendezvous hashing of its opening (Thaler and Ravishankar 1998):
    rollouts of one scenario meet on one member, and a member that is gone moves only its own. A member with more than SLACK
    times its share gets no new ones.
    """

    def __init__(self, members: Sequence[SupervisedSampler]) -> None:
        self._members = members
        self._known: OrderedDict[str, int] = OrderedDict()

    def member(self, payload: Mapping[str, Json], trajectory: str | None) -> SupervisedSampler:
        """The member for a call of a trajectory, or of none. If no member answers calls now, one that sleeps, else any."""
        members = self._members
        present = [index for index, member in enumerate(members) if member.state == "ok"] or list(range(len(members)))
        present = [index for index in present if members[index].calls.awake] or present
        if trajectory is None:
            return members[self._by_opening(payload, present)]
        index = self._known.get(trajectory)
        if index is None or index not in present:
            self._known[trajectory] = index = self._by_opening(payload, present)
        self._known.move_to_end(trajectory)
        if len(self._known) > MAX_TRAJECTORIES:
            self._known.popitem(last=False)
        return members[index]

    def _by_opening(self, payload: Mapping[str, Json], present: Sequence[int]) -> int:
        loads = {index: self._members[index].calls.in_flight for index in present}
        most = SLACK * (1 + sum(loads.values())) / len(loads)
        free = [index for index in present if loads[index] < most]
        key = blake2b(_opening(payload), digest_size=16).digest()
        return max(free, key=lambda index: blake2b(key + index.to_bytes(2, "big"), digest_size=8).digest())


def _opening(payload: Mapping[str, Json]) -> bytes:
    """What rollouts of a scenario share: the model, and the prompt or the messages up to the first user message."""
    if "prompt" in payload:
        return orjson.dumps([payload["model"], payload["prompt"]])
    shared: list[Json] = []
    for message in payload["messages"]:
        shared.append(message)
        if message.get("role") == "user":
            break
    return orjson.dumps([payload["model"], shared])
