"""One rollout of a user's function or graph: its calls captured, its outcome turned into a trajectory."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from langchain_core.messages import BaseMessage, convert_to_openai_messages
from langchain_core.runnables import Runnable

from understudy.client.model import TrainableModel
from understudy.errors import RolloutError
from understudy.rewards.outcome import as_reward
from understudy.scenarios.identity import scenario_id, scenario_text
from understudy.types import Message, RolloutException, Trajectory

from .capture import Select
from .scope import capture

Reward = Callable[[Any, Any], object]
"""(scenario, output) -> a number, a dict of numbers with `reward`, or a RewardResult; sync or async."""


@dataclass(frozen=True)
class FunctionAgent:
    """A user's function of one scenario, async or sync; a sync one runs in a thread of its own."""

    function: Callable[..., Any]

    async def run(self, scenario: Any, thread_id: str) -> object:
        del thread_id  # functions read current_trajectory().id
        if inspect.iscoroutinefunction(inspect.unwrap(self.function)):
            return await self.function(scenario)
        outcome = await in_own_thread(functools.partial(self.function, scenario))
        return await outcome if inspect.isawaitable(outcome) else outcome


@dataclass(frozen=True)
class GraphAgent:
    """A compiled graph, or any Runnable; each rollout has a thread of its own in checkpointers."""

    graph: Runnable[Any, Any]
    to_input: Callable[[Any], Any] | None = None

    async def run(self, scenario: Any, thread_id: str) -> object:
        given = self.to_input(scenario) if self.to_input else {"messages": [("user", scenario_text(scenario))]}
        return await self.graph.ainvoke(given, {"configurable": {"thread_id": thread_id}})


@dataclass(frozen=True)
class Plan:
    """How an agent is trained: by which model, from which rewards, on which of its calls, at which temperature."""

    model: TrainableModel
    reward: Reward | None = None
    select: Select | None = None
    to_input: Callable[[Any], Any] | None = None
    temperature: float = 1.0

    async def rollout(self, agent: FunctionAgent | GraphAgent, scenario: object) -> Trajectory:
        """Run the agent once on its stand-in. What it raises is kept on the trajectory, which stays unscored."""
        trajectory = Trajectory(captured=True, metadata={"scenario_id": scenario_id(scenario)})
        scope = capture(self.model, trajectory=trajectory, select=self.select, temperature=self.temperature)
        async with scope:
            try:
                output = await agent.run(scenario, trajectory.id)
                trajectory.messages_and_choices = list(conversation(output))
                trajectory = await self._outcome(agent, trajectory, scenario, output)
            except Exception as error:  # noqa: BLE001  # user code: a failed rollout is data, kept with its traceback
                trajectory.reward = None
                trajectory.exception = as_exception(error)
        return trajectory.finish()

    async def _outcome(
        self, agent: FunctionAgent | GraphAgent, trajectory: Trajectory, scenario: object, output: object
    ) -> Trajectory:
        """The trajectory with its reward: from `reward=`, else from what a function returned."""
        value, source = output, "the function's return value"
        if self.reward is not None:
            given = self.reward(scenario, output)
            value, source = (await given if inspect.isawaitable(given) else given), "reward="
        elif isinstance(agent, GraphAgent) or output is None:
            return trajectory  # a judge decides
        if isinstance(value, Trajectory):
            return value.model_copy(update={"id": trajectory.id, "captured": True})
        try:
            result = as_reward(value, source)
        except RolloutError as error:
            raise RolloutError(
                f"{error}. Return a number (or a dict with `reward`), or pass reward=(scenario, output) -> number"
            ) from error
        trajectory.reward = result.reward
        trajectory.metrics.update(result.metrics)
        return trajectory


def conversation(output: object) -> list[Message]:
    """The messages of a graph's state in OpenAI's shape, for people and judges; none for another output."""
    messages: object = cast(Mapping[str, object], output).get("messages") if isinstance(output, Mapping) else None
    if not isinstance(messages, list) or not all(
        isinstance(each, BaseMessage) for each in cast(list[object], messages)
    ):
        return []
    return convert_to_openai_messages(cast(list[BaseMessage], messages))


def as_exception(error: Exception) -> RolloutException:
    """An exception as it is recorded."""
    return RolloutException(
        type=type(error).__name__, message=str(error), traceback="".join(traceback.format_exception(error))
    )


async def in_own_thread(work: Callable[[], Any]) -> Any:
    """Run blocking work in a thread of its own, in a copy of this context. Cancelled, it is left to end by itself."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except StopIteration as raised:  # no future takes it
            error = RuntimeError(f"the function raised {raised!r}")
            error.__cause__ = raised
        except BaseException as raised:  # noqa: BLE001  # handed to the awaiting task, whatever it is
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop ended first: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="understudy-rollout", daemon=True).start()
    return await done
