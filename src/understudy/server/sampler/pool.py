"""Several samplers as one: each call goes to the one with the fewest calls in flight, every adapter is loaded in all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from ...errors import EngineError
from ...types import Json
from .answer_limits import MAX_ANSWER
from .sampler import SamplerState
from .supervised import SupervisedSampler
from .transport import Reply


class SamplerPool:
    """A call that one member cannot answer goes to another."""

    def __init__(self, members: Sequence[SupervisedSampler]) -> None:
        self.members = members
        for member in members:
            member.has_others = True
        self.calls = PoolCalls(self)
        self.adapters = PoolAdapters(self)

    @property
    def state(self) -> SamplerState:
        states = {member.state for member in self.members}
        return next(state for state in ("ok", "starting", "failed", "stopped") if state in states)

    @property
    def detail(self) -> str | None:
        return "\n".join(member.detail for member in self.members if member.detail) or None

    @property
    def restarts(self) -> int:
        return sum(member.restarts for member in self.members)

    def present(self) -> list[SupervisedSampler]:
        """The members that answer calls now."""
        return [member for member in self.members if member.state == "ok"]

    def start(self) -> None:
        for member in self.members:
            member.start()

    async def ready(self) -> None:
        """Wait until one answers calls. Raises EngineError with the reasons when none can be had."""
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
        await asyncio.gather(*(member.stop(deadline) for member in self.members))

    def kill(self) -> None:
        for member in self.members:
            member.kill()


class PoolCalls:
    """Calls to a pool."""

    def __init__(self, pool: SamplerPool) -> None:
        self._pool = pool

    @property
    def in_flight(self) -> int:
        return sum(member.calls.in_flight for member in self._pool.members)

    async def post(self, payload: Mapping[str, Json], limit: int = MAX_ANSWER) -> Reply:
        for others in range(len(self._pool.members) - 1, -1, -1):
            member = await self._next()
            try:
                return await member.calls.post(payload, limit)
            except EngineError:
                if member.state == "ok" or not others:
                    raise
        raise AssertionError("unreachable")

    @asynccontextmanager
    async def stream(self, payload: Mapping[str, Json]) -> AsyncGenerator[aiohttp.ClientResponse]:
        for others in range(len(self._pool.members) - 1, -1, -1):
            member = await self._next()
            async with AsyncExitStack() as stack:
                try:
                    response = await stack.enter_async_context(member.calls.stream(payload))
                except EngineError:
                    if member.state == "ok" or not others:
                        raise
                    continue
                yield response
                return

    @asynccontextmanager
    async def asleep(self) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            for member in self._pool.members:
                await stack.enter_async_context(member.calls.asleep())
            yield

    async def queue_seconds(self) -> float | None:
        answers = await asyncio.gather(*(member.calls.queue_seconds() for member in self._pool.present()))
        known = [answer for answer in answers if answer is not None]
        return sum(known) / len(known) if known else None

    async def _next(self) -> SupervisedSampler:
        await self._pool.ready()
        return min(self._pool.present() or self._pool.members, key=lambda member: member.calls.in_flight)


class PoolAdapters:
    """The adapters that every member of a pool has, or gets when it is there."""

    def __init__(self, pool: SamplerPool) -> None:
        self._pool = pool
        self._folders: dict[str, Path] = {}

    @property
    def loaded(self) -> Collection[str]:
        return self._folders

    async def load(self, adapter: str, folder: Path) -> None:
        """Into each that is there; the others load it when they are. Raises EngineError."""
        await self._pool.ready()
        await asyncio.gather(*(member.adapters.load(adapter, folder) for member in self._pool.present()))
        for member in self._pool.members:
            member.adapters.expect(adapter, folder)
        self._folders[adapter] = folder

    async def unload(self, adapter: str) -> None:
        """From each that is there; the others do not get it again. Raises EngineError."""
        self._folders.pop(adapter, None)
        present = self._pool.present()
        for member in self._pool.members:
            if member not in present:
                member.adapters.forget(adapter)
        await asyncio.gather(*(member.adapters.unload(adapter) for member in present))
