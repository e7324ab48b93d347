"""Several samplers that act as one: replicas of this server, or vLLM servers that run already.

A member is a `SupervisedSampler`. `Routes` chooses the member of a call, so that turns of a trajectory and rollouts of a scenario
find their prefix cached. Every adapter is loaded on all members.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import blake2b
from pathlib import Path

import aiohttp
import orjson

from offbook.base.errors import EngineError
from offbook.base.types import Json

from .supervised import LoadedAdapters, SamplerClient, SamplerState, SupervisedSampler
from .transport import MAX_ANSWER, Reply

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


class SamplerPool:
    """A Sampler of several members. If a member fails, its calls are sent to another member."""

    def __init__(self, members: Sequence[SupervisedSampler]) -> None:
        """`members` must not be started yet; `start` starts them."""
        self.members = members
        for member in members:
            member.has_others = True
        self.calls = PoolCalls(self)
        self.adapters = PoolAdapters(self)

    @property
    def state(self) -> SamplerState:
        """The best state of any member."""
        states = {member.state for member in self.members}
        return next(state for state in ("ok", "starting", "failed", "stopped") if state in states)

    @property
    def detail(self) -> str | None:
        """The members' details, one per line; None if no member has any."""
        return "\n".join(member.detail for member in self.members if member.detail) or None

    @property
    def restarts(self) -> int:
        """How often members were restarted."""
        return sum(member.restarts for member in self.members)

    async def started(self) -> None:
        """Wait until one member answers calls, and all that this server starts. Raises EngineError as soon as one of these
        failed."""
        own = [asyncio.create_task(member.ready()) for member in self.members if member.must_start]
        if own:
            done, waiting = await asyncio.wait(own, return_when=asyncio.FIRST_EXCEPTION)
            for task in waiting:
                task.cancel()
            if reasons := [str(error) for task in own if task in done and (error := task.exception()) is not None]:
                raise EngineError("\n".join(reasons))
        await self.ready()

    def present(self) -> list[SupervisedSampler]:
        """The members that answer calls now."""
        return [member for member in self.members if member.state == "ok"]

    def start(self) -> None:
        """Start all members in the background."""
        for member in self.members:
            member.start()

    async def ready(self) -> None:
        """Wait until one member answers calls. Raises EngineError with all reasons if every member failed."""
        waiting = {asyncio.create_task(member.ready()) for member in self.members}
        reasons: list[str] = []
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if error is None:
                        return
                    reasons.append(str(error))
        finally:
            for task in waiting:
                task.cancel()
        raise EngineError("\n".join(reasons))

    async def stop(self, deadline: float = 10.0) -> None:
        """Stop all members within `deadline` seconds."""
        await asyncio.gather(*(member.stop(deadline) for member in self.members))

    def kill(self) -> None:
        """Kill the members that are children of this process."""
        for member in self.members:
            member.kill()


class PoolCalls:
    """Chat completions of a pool. The methods are those of `SamplerClient`."""

    def __init__(self, pool: SamplerPool) -> None:
        self._pool = pool
        self._routes = Routes(pool.members)

    @property
    def in_flight(self) -> int:
        """Number of calls in flight on all members."""
        return sum(member.calls.in_flight for member in self._pool.members)

    async def post(self, payload: Mapping[str, Json], limit: int = MAX_ANSWER, trajectory: str | None = None) -> Reply:
        """A whole chat completion from one member. A member that dies is replaced by another until none is left."""
        for untried in range(len(self._pool.members) - 1, -1, -1):
            member = await self._next(payload, trajectory)
            try:
                return await member.calls.post(payload, limit)
            except EngineError:
                if member.state == "ok" or not untried:
                    raise
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def stream(
        self, payload: Mapping[str, Json], trajectory: str | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A streamed chat completion from one member. Members are tried as in `post` until a stream opens."""
        for untried in range(len(self._pool.members) - 1, -1, -1):
            member = await self._next(payload, trajectory)
            async with AsyncExitStack() as stack:
                try:
                    response = await stack.enter_async_context(member.calls.stream(payload))
                except EngineError:
                    if member.state == "ok" or not untried:
                        raise
                    continue
                yield response
                return

    @asynccontextmanager
    async def asleep(self, *, keep_weights: bool = False) -> AsyncGenerator[None]:
        """The members that share a GPU with the learner fall asleep together, and wake together at the block's end."""
        members = [member for member in self._pool.members if member.shares_gpu]
        sleeps = [AsyncExitStack() for _ in members]
        try:
            await _all(_sleep(*pair, keep_weights=keep_weights) for pair in zip(members, sleeps, strict=True))
            yield
        finally:
            await _all(sleep.aclose() for sleep in sleeps)

    async def _next(self, payload: Mapping[str, Json], trajectory: str | None) -> SupervisedSampler:
        await self._pool.ready()
        return self._routes.member(payload, trajectory)


class PoolAdapters:
    """The adapters of a pool: loaded on every member, or scheduled for its next start."""

    def __init__(self, pool: SamplerPool) -> None:
        self._pool = pool
        self._folders: dict[str, Path] = {}

    @property
    def loaded(self) -> Collection[str]:
        """The names of the adapters."""
        return self._folders

    async def load(self, adapter: str, folder: Path) -> None:
        """Load an adapter on all members that answer; the others load it when they start. Raises EngineError."""
        await self._pool.ready()
        present = self._pool.present()
        for member in self._pool.members:
            if member not in present:
                member.adapters.remember(adapter, folder)
        await _all(_load(member, adapter, folder) for member in present)
        self._folders[adapter] = folder

    async def unload(self, adapter: str) -> None:
        """Unload an adapter from all members that answer; the others no longer load it. Raises EngineError."""
        self._folders.pop(adapter, None)
        present = self._pool.present()
        for member in self._pool.members:
            if member not in present:
                member.adapters.forget(adapter)
        await _all(member.adapters.unload(adapter) for member in present)


Sampler = SupervisedSampler | SamplerPool
SamplerCalls = SamplerClient | PoolCalls
SamplerAdapters = LoadedAdapters | PoolAdapters


async def _all(tasks: Iterable[Coroutine[None, None, None]]) -> None:
    """Wait for all tasks, whatever becomes of the others. Raises the first error."""
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if outcome is not None:
            raise outcome


async def _sleep(member: SupervisedSampler, sleep: AsyncExitStack, *, keep_weights: bool) -> None:
    """Put a member to sleep until `sleep` is closed. One that is starting is waited for; one that failed, or is stopped, holds
    no memory. Raises EngineError if it answers and does not sleep."""
    while member.state in ("ok", "starting"):
        try:
            await sleep.enter_async_context(member.calls.asleep(keep_weights=keep_weights))
        except EngineError:
            if member.state == "ok":
                raise
        else:
            return


async def _load(member: SupervisedSampler, adapter: str, folder: Path) -> None:
    """Load an adapter on a member. One that dies meanwhile loads it at its next start. Raises EngineError."""
    try:
        await member.adapters.load(adapter, folder)
    except EngineError:
        if member.state == "ok":
            raise
        member.adapters.remember(adapter, folder)
