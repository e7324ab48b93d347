"""Runs the reference calls of plans and scenarios in new rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from offbook_mcp.connection.pool import ServerPool
from offbook_mcp.errors import McpServerError, McpStartError, McpToolsChangedError
from offbook_mcp.tools.free_form import result_digest
from offbook_mcp.tools.rollout_tools import RolloutTools
from offbook_mcp.tools.tool import ToolKind

from .dates import is_dated
from .expected_answers import Answered
from .explore import Exploration, Observation, answered, too_slow
from .harvest import strings_of
from .scenario import ReferenceCall

APART_SECONDS = 1.2
"""Pause between the two runs: a tool that returns the time in whole seconds must give different results."""
SERVER_FAILED = "the server failed"
_AT_ONCE = 2
_SNAPSHOT_CALLS = 6


class Runnable(Protocol):
    """Something with reference calls: a plan or a written scenario."""

    @property
    def calls(self) -> tuple[ReferenceCall, ...]: ...


@dataclass(frozen=True)
class ReferenceRun:
    """The results of reference calls.

    `fault` is why they cannot become a scenario, and `example` the call and the answer that show it; "" if they can. `effect` is whether the calls changed what the server's
    reading tools return; None if nothing was written.
    """

    answers: tuple[Answered, ...] = field(default=(), hash=False)
    fault: str = ""
    example: str = ""
    effect: bool | None = None


def with_results(
    calls: Sequence[ReferenceCall], first: ReferenceRun, second: ReferenceRun
) -> tuple[ReferenceCall, ...]:
    """The calls with the hashes of their results, where both runs have the same and it will not depend on the date."""
    return tuple(
        call.model_copy(update={"returned": one.digest})
        if one.digest == other.digest and not is_dated(one.text)
        else call
        for call, one, other in zip(calls, first.answers, second.answers, strict=True)
    )


class Executor:
    """Runs reference calls. Plans that only read share a rollout; every other plan gets a new one."""

    def __init__(self, pool: ServerPool, exploration: Exploration) -> None:
        self._pool = pool
        self._found = exploration
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.ended = 0.0
        self._reading = {tool.name for tool in pool.toolset.tools if tool.tool.kind is ToolKind.READ}
        self._effective: set[str] = set()
        """Tools whose write was visible at least once."""

    def writes(self, calls: Sequence[ReferenceCall]) -> bool:
        """Whether a call may change something."""
        return any(call.tool not in self._reading for call in calls)

    async def run(self, plans: Sequence[Runnable]) -> list[ReferenceRun]:
        """Run every plan once; the results are in the order of the plans.

        A write without a visible effect is a fault if it should be visible.
        """
        runs: dict[int, ReferenceRun] = {}
        reading = [number for number, plan in enumerate(plans) if not self.writes(plan.calls)]
        writing = [number for number, plan in enumerate(plans) if self.writes(plan.calls)]

        async def alone(number: int) -> None:
            async with self._slots:
                runs[number] = await self._in_rollout(lambda tools: self._with_effect(tools, plans[number].calls))

        await asyncio.gather(self._reading_runs(plans, reading, runs), *(alone(number) for number in writing))
        self.ended = time.monotonic()
        for number in writing:
            self._learn_effect(plans[number].calls, runs[number])
        return [self._with_fault(plan.calls, runs[number]) for number, plan in enumerate(plans)]

    async def again(self, plans: Sequence[Runnable]) -> list[ReferenceRun]:
        """Run every plan a second time, at least APART_SECONDS after the first."""
        await asyncio.sleep(max(0.0, self.ended + APART_SECONDS - time.monotonic()))
        return await self.run(plans)

    async def _reading_runs(self, plans: Sequence[Runnable], numbers: list[int], runs: dict[int, ReferenceRun]) -> None:
        """Run the plans in one rollout. After a server failure, or a call without an answer, continue in a new one."""
        waiting = list(numbers)

        async def all_of(tools: RolloutTools) -> ReferenceRun:
            while waiting:
                number = waiting[0]
                runs[number] = ReferenceRun(fault=SERVER_FAILED)
                runs[number] = await self._calls(tools, plans[number].calls)
                waiting.pop(0)
                if runs[number].fault == too_slow(tools):
                    break
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
            raise  # all later plans would fail too
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

    def _learn_effect(self, calls: Sequence[ReferenceCall], run: ReferenceRun) -> None:
        """Learn from calls with one writing tool whether its writes are visible."""
        writers = {call.tool for call in calls} - self._reading
        if run.effect and len(writers) == 1:
            self._effective |= writers

    def _with_fault(self, calls: Sequence[ReferenceCall], run: ReferenceRun) -> ReferenceRun:
        """The run, with a fault if it changed nothing although a write of its tools was visible."""
        visible = {call.tool for call in calls} & self._effective
        return replace(run, fault="nothing was changed") if run.effect is False and visible else run

    async def _calls(self, tools: RolloutTools, calls: Sequence[ReferenceCall]) -> ReferenceRun:
        answers: list[Answered] = []
        for call in calls:
            try:
                result, text = await answered(tools, call.tool, call.arguments)
            except TimeoutError:
                return ReferenceRun(fault=too_slow(tools))
            tool = self._pool.toolset.find(call.tool)
            if tool is not None and (fault := self._found.fault(tool, call.arguments, result, text)):
                return ReferenceRun(fault=fault, example=f"{call.tool}: {text}" if text.strip() else call.tool)
            digest = result_digest(tools, tool, result) if tool is not None and not tool.tool.open_world else ""
            answers.append(Answered(call.tool, call.arguments, result, text, digest))
        return ReferenceRun(tuple(answers))

    def _looks(self, calls: Sequence[ReferenceCall]) -> list[Observation]:
        """Observed reading calls that may show what a write changed; those with the same values come first."""
        texts = {text for call in calls for text in strings_of(call.arguments)}
        usable = [
            observation
            for observation in self._found.observations
            if observation.tool in self._reading and not observation.is_error
        ]
        ranked = sorted(
            usable,
            key=lambda observation: (
                not texts & set(strings_of(observation.arguments)),
                len(repr(observation.arguments)),
            ),
        )
        chosen: dict[str, Observation] = {}
        for observation in ranked:
            chosen.setdefault(observation.tool, observation)
        return list(chosen.values())[:_SNAPSHOT_CALLS]

    async def _look(self, tools: RolloutTools, look: Observation) -> str:
        try:
            return (await answered(tools, look.tool, look.arguments))[1]
        except TimeoutError:
            return ""
