"""Runs one rollout of a user's function or graph inside a capture and turns the outcome into a trajectory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from langchain_core.messages import BaseMessage, convert_to_openai_messages

from offbook import RewardResult, Trajectory
from offbook.base.errors import CaptureError, ConfigError, RolloutError
from offbook.base.options import RunOptions, option
from offbook.base.types import Message, as_rollout_exception
from offbook.client.rollouts.capture import capturing, logged_reward
from offbook.contracts import Judge
from offbook.rewards.reward_result import as_reward
from offbook.scenarios.identity import scenario_id
from offbook_langgraph.calls.active_capture import OnLeak, Scope, SharedState
from offbook_langgraph.calls.capture_block import Answerers, Models, capture
from offbook_langgraph.calls.observe import observe
from offbook_langgraph.calls.origins import OriginCounts
from offbook_langgraph.calls.recorded_calls import TrainOn
from offbook_langgraph.calls.selection import Selection

from .agents import (
    Agent,
    OnInterrupt,
    ToContext,
    ToInput,
)

Reward: TypeAlias = Callable[[Any, Any], object] | Literal["logged"]
"""(scenario, output) -> a number, a dict of numbers with `reward`, or a RewardResult; sync or async. "logged" means that the
reward is the sum of the agent's `offbook.log_reward` calls."""


@dataclass(frozen=True, kw_only=True)
class TrainableOptions(RunOptions):
    """The options of `trainable`."""

    model: Models | None = option(
        None,
        'the TrainableModel; or several, each with a selection of calls: `{planner: {"node": "plan"}, writer: {...}}`',
    )
    reward: Reward | None = option(
        None,
        "(scenario, output) -> a number, a dict with `reward`, or a RewardResult; None: what the function returns. A graph "
        'needs it, or "logged" if the graph calls `offbook.log_reward`, or `judge`',
    )
    judge: Judge | None = option(None, "async function: takes a finished group, returns it with rewards")
    select: Selection | None = option(None, "the app's calls that go to the trained model; None: all; see `Selection`")
    exclude: Selection | None = option(None, "the app's calls that keep its own model")
    to_input: ToInput | None = option(None, "scenario -> the graph's input")
    on_interrupt: OnInterrupt | None = option(None, "value of an interrupt -> the value that resumes the graph")
    context: ToContext | object = option(
        None, "run-scoped context of a graph with a `context_schema`, or scenario -> context"
    )
    temperature: float = option(1.0, "sampling temperature of rollouts")
    max_completion_tokens: int | None = option(
        None, "limit per call, unless the app sets a smaller one; None: 1,024. `train(...)` can override it"
    )
    scope: Scope = option("context", "see `capture`")
    on_leak: OnLeak = option("error", "see `capture`")
    shared_state: SharedState = option("error", "see `capture`")
    train_on: TrainOn | None = option(None, "see `capture`")

    def models(self) -> Models:
        """The trained models. Raises ConfigError when there is none."""
        if self.model is None:
            raise ConfigError(
                "model: no model to train: pass trainable(model=offbook.TrainableModel(...)), train(..., model=...), or on the "
                "command line --model and --base-model"
            )
        return self.model

    def capture(self, trajectory: Trajectory, answerers: Answerers | None = None) -> capture:
        """Create the capture of one rollout. `answerers` replace the trained models in a comparison."""
        several = isinstance(answerers, Mapping)
        return capture(
            self.models() if answerers is None else answerers,
            select=None if several else self.select,
            exclude=self.exclude,
            scope=self.scope,
            trajectory=trajectory,
            temperature=self.temperature,
            on_leak=self.on_leak,
            shared_state=self.shared_state,
            train_on=self.train_on,
        )

    def observe(self, trajectory: Trajectory) -> observe:
        """Create the observation of one rollout on the app's own models: of the calls that training would capture."""
        select = None if isinstance(self.model, Mapping) else self.select
        return observe(select=select, exclude=self.exclude, scope=self.scope, trajectory=trajectory)

    async def rollout(
        self,
        agent: Agent,
        scenario: object,
        judged: bool,
        counts: OriginCounts,
        *,
        trajectory: Trajectory | None = None,
        answerers: Answerers | None = None,
        as_is: bool = False,
    ) -> Trajectory:
        """Run the agent once inside a capture and score the result.

        An exception of the agent or the reward is stored on the trajectory, which stays unscored. A CaptureError is raised.
        `judged` means that a judge scores later. The origins of the calls are added to `counts`. `answerers`: see `capture`.
        `as_is`: the app's own models answer, and the trajectory has their calls as `outside_calls`.
        """
        trajectory = Trajectory() if trajectory is None else trajectory
        trajectory.captured = not as_is
        trajectory.metadata["scenario_id"] = scenario_id(scenario)
        block = self.observe(trajectory) if as_is else self.capture(trajectory, answerers)
        with capturing(trajectory):
            try:
                async with block:
                    output = await agent.run(scenario, trajectory.id)
                    trajectory.messages_and_choices = list(conversation(output))
                # Outside the capture: an LLM judge inside `reward=` must not be redirected.
                trajectory = await self._scored(agent, trajectory, scenario, output, judged)
            except CaptureError:
                raise
            except Exception as error:  # noqa: BLE001  # user code: a failed rollout is data, kept with its traceback
                trajectory.reward = None
                trajectory.exception = as_rollout_exception(error)
            finally:
                if isinstance(block, observe):
                    trajectory.outside_calls, trajectory.captured = block.calls, False
                else:
                    counts.merge(block.counts)
        return trajectory.finish()

    async def _scored(
        self, agent: Agent, trajectory: Trajectory, scenario: object, output: object, judged: bool
    ) -> Trajectory:
        """Set the reward: from `reward=`, else the function's return value, plus the logged rewards. Raises RolloutError."""
        value: object = None
        if callable(self.reward):
            value = self.reward(scenario, output)
            value = await value if inspect.isawaitable(value) else value
        elif self.reward is None and not agent.returns_output and not (judged and not is_reward(output)):
            value = output
        if isinstance(value, Trajectory):
            return own_trajectory(value, trajectory)
        logged = logged_reward(trajectory)
        if value is None and self.reward is not None and callable(self.reward):
            raise RolloutError("reward= returned None; a number, a dict with `reward` or a RewardResult is needed")
        if value is None and logged is None and not judged:
            raise RolloutError(_no_reward(self.reward, output))
        if value is not None:
            result = self._as_reward(value)
            trajectory.reward = result.reward + (logged or 0.0)
            trajectory.metrics.update(result.metrics)
        else:
            trajectory.reward = logged
        return trajectory

    def _as_reward(self, value: object) -> RewardResult:
        try:
            return as_reward(value, "reward=" if self.reward is not None else "the function's return value")
        except RolloutError as error:
            raise RolloutError(
                f"{error}. Return a number (or a dict with `reward`), or pass reward=(scenario, output) -> number"
            ) from error


def is_reward(output: object) -> bool:
    """Whether a function's return value can be a reward. Otherwise it is an output for a judge."""
    if isinstance(output, Mapping):
        return "reward" in output
    return isinstance(output, int | float | RewardResult | Trajectory)


def own_trajectory(value: Trajectory, captured: Trajectory) -> Trajectory:
    """A copy of the trajectory that the function returned, merged with the captured one and its calls."""
    kept: dict[str, object] = {
        "id": captured.id,
        "captured": captured.captured,
        "weights": captured.weights,
        "unused": captured.unused,
    }
    kept["tool_runs"] = captured.tool_runs
    kept["metrics"] = {**captured.metrics, **value.metrics}
    kept["metadata"] = {**captured.metadata, **value.metadata}
    kept["logs"] = [*captured.logs, *value.logs]
    return value.model_copy(update=kept)


def _no_reward(reward: object, output: object) -> str:
    if reward == "logged":
        return 'reward="logged", but the agent did not call offbook.log_reward: call it, or pass reward= or judge='
    return (
        f"the function returned {type(output).__name__} {output!r}, and there is no reward: return a number (or a dict with "
        "`reward`), pass reward=(scenario, output) -> number, judge=, or call offbook.log_reward inside"
    )


def conversation(output: object) -> list[Message]:
    """The messages of a graph's state in OpenAI's format, for display and judges; empty for another output."""
    messages: object = cast(Mapping[str, object], output).get("messages") if isinstance(output, Mapping) else None
    if not isinstance(messages, list) or not all(
        isinstance(message, BaseMessage) for message in cast(list[object], messages)
    ):
        return []
    return convert_to_openai_messages(cast(list[BaseMessage], messages))
