"""Reference calls, run in fresh rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..connection.pool import ServerPool
from ..errors import McpServerError, McpStartError, McpToolsChangedError
from ..tools.rollout_tools import RolloutTools
from ..tools.tool import ToolKind
from .answers import Answered
from .explore import CALL_SECONDS, Exploration, Observation, answered
from .harvest import strings_of
from .scenario import ReferenceCall

APART_SECONDS = 1.2
"""Between the two runs: clocks with a resolution of a second were seen to give equal answers."""
SERVER_FAILED = "the server failed"
_AT_ONCE = 2
_SNAPSHOT_CALLS = 6


class Runnable(Protocol):
    """A plan or a written scenario, as its calls."""

    @property
    def calls(self) -> tuple[ReferenceCall, ...]: ...


@dataclass(frozen=True)
class ReferenceRun:
    """What the calls answered; `fault` is why they make no scenario, "" where they do. `effect`: what the server shows has
    changed (None where nothing was written)."""

    answers: tuple[Answered, ...] = field(default=(), hash=False)
    fault: str = ""
    effect: bool | None = None


class Executor:
    """Runs calls: those that only read share a rollout, each of the others has a fresh one."""

    def __init__(self, pool: ServerPool, found: Exploration) -> None:
        self._pool = pool
        self._found = found
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.ended = 0.0
        self._reading = {tool.name for tool in pool.toolset.tools if tool.tool.kind is ToolKind.READ}

    def writes(self, calls: Sequence[ReferenceCall]) -> bool:
        """Whether a call may change something."""
        return any(call.tool not in self._reading for call in calls)

    async def run(self, plans: Sequence[Runnable]) -> list[ReferenceRun]:
        """One run of each, in their order."""
        runs: dict[int, ReferenceRun] = {}
        reading = [number for number, plan in enumerate(plans) if not self.writes(plan.calls)]
        writing = [number for number, plan in enumerate(plans) if self.writes(plan.calls)]

        async def alone(number: int) -> None:
            async with self._slots:
                runs[number] = await self._in_rollout(lambda tools: self._with_effect(tools, plans[number].calls))

        await asyncio.gather(self._reading_runs(plans, reading, runs), *(alone(number) for number in writing))
        self.ended = time.monotonic()
        return [runs[number] for number in range(len(plans))]

    async def again(self, plans: Sequence[Runnable]) -> list[ReferenceRun]:
        """A second run, at a later moment."""
        await asyncio.sleep(max(0.0, self.ended + APART_SECONDS - time.monotonic()))
        return await self.run(plans)

    async def _reading_runs(self, plans: Sequence[Runnable], numbers: list[int], runs: dict[int, ReferenceRun]) -> None:
        """All in one rollout; a fresh one follows where a server failed."""
        waiting = list(numbers)

        async def all_of(tools: RolloutTools) -> ReferenceRun:
            while waiting:
                number = waiting[0]
                runs[number] = ReferenceRun(fault=SERVER_FAILED)
                runs[number] = await self._calls(tools, plans[number].calls)
                waiting.pop(0)
            return ReferenceRun()

        while waiting:
            before = len(waiting)
            ended = await self._in_rollout(all_of)
            if ended.fault and waiting:
                number = waiting.pop(0)
                runs[number] = ended
            elif len(waiting) == before:
                return

    async def _in_rollout(self, work: Callable[[RolloutTools], Awaitable[ReferenceRun]]) -> ReferenceRun:
        try:
            async with self._pool.rollout() as tools:
                return await work(tools)
        except (McpStartError, McpToolsChangedError):
            raise  # no later plan would fare better
        except McpServerError:
            return ReferenceRun(fault=SERVER_FAILED)

    async def _with_effect(self, tools: RolloutTools, calls: Sequence[ReferenceCall]) -> ReferenceRun:
        looks = self._looks(calls)
        before = [await self._look(tools, look) for look in looks]
        run = await self._calls(tools, calls)
        if run.fault:
            return run
        after = [await self._look(tools, look) for look in looks]
        return ReferenceRun(run.answers, effect=before != after)

    async def _calls(self, tools: RolloutTools, calls: Sequence[ReferenceCall]) -> ReferenceRun:
        answers: list[Answered] = []
        for call in calls:
            try:
                result, text = await answered(tools, call.tool, call.arguments)
            except TimeoutError:
                return ReferenceRun(fault=f"a call took more than {CALL_SECONDS:g} s")
            if result.is_error:
                return ReferenceRun(fault="a tool reported an error")
            if call.tool in self._reading and self._found.is_empty(call.tool, call.arguments, result, text):
                return ReferenceRun(fault="an answer was empty")
            answers.append(Answered(call.tool, call.arguments, result, text))
        return ReferenceRun(tuple(answers))

    def _looks(self, calls: Sequence[ReferenceCall]) -> list[Observation]:
        """Observed calls that read, to see what a call that writes has changed: those with the same values first."""
        given = {text for call in calls for text in strings_of(call.arguments)}
        usable = [each for each in self._found.observations if each.tool in self._reading and not each.is_error]
        ranked = sorted(
            usable, key=lambda each: (not given & set(strings_of(each.arguments)), len(repr(each.arguments)))
        )
        chosen: dict[str, Observation] = {}
        for each in ranked:
            chosen.setdefault(each.tool, each)
        return list(chosen.values())[:_SNAPSHOT_CALLS]

    async def _look(self, tools: RolloutTools, look: Observation) -> str:
        try:
            return (await answered(tools, look.tool, look.arguments))[1]
        except TimeoutError:
            return ""
