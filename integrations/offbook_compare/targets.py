"""Targets of a comparison: apps whose calls any model can answer."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from offbook.base.errors import ConfigError, RolloutError
from offbook.base.types import Trajectory
from offbook.client.model import Model, TrainableModel
from offbook.client.rollouts.capture import capturing, logged_reward
from offbook.contracts import Judge
from offbook.rewards.reward_result import as_reward
from offbook.trainer.options import RewardFunction
from offbook.trainer.trainable_target import load_target


@runtime_checkable
class ComparableTarget(Protocol):
    """An app that `compare` can run. Everything that `trainable` returns implements it."""

    def own_models(self) -> tuple[TrainableModel, ...]:
        """The trained models; empty if the app was wrapped without one."""
        ...

    def own_judge(self) -> Judge | None:
        """The judge that the app was wrapped with."""
        ...

    def max_concurrency(self) -> int | None:
        """How many rollouts may run at once; None means no limit."""
        ...

    async def rollout_by(
        self, models: Sequence[Model[Any]], scenario: object, trajectory: Trajectory, *, judged: bool
    ) -> Trajectory:
        """Run one rollout with `models` in place of `own_models`, in the same order; one model if there are none.

        Calls are recorded under `trajectory`. `judged` means that a judge scores later.
        """
        ...


@runtime_checkable
class SelfAnswering(Protocol):
    """A ComparableTarget that can also run on the models that it calls by itself, for the candidate `as-is`."""

    async def rollout_as_is(self, scenario: object, trajectory: Trajectory, *, judged: bool) -> Trajectory:
        """Run one rollout on the app's own models. The result has their calls as `outside_calls`, with their tokens."""
        ...


MCP = "mcp:"
"""Before a server's command, URL or mcp.json."""
CompareRollout = Callable[[Any, Any], Awaitable[Trajectory]]
"""(model, scenario) -> the finished trajectory: the same rollout function as for a Trainer."""


class SplitScenarios(Protocol):
    """Scenarios with their split; `eval` are held out."""

    @property
    def scenarios(self) -> Sequence[object]: ...

    @property
    def train(self) -> Sequence[object]: ...

    @property
    def eval(self) -> Sequence[object]: ...


@runtime_checkable
class ServerTarget(Protocol):
    """A server that is started for its rollouts, and has scenarios of its own: an `offbook_mcp.MCPTrainer`."""

    @property
    def model(self) -> TrainableModel: ...

    @property
    def judge(self) -> Judge | None: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    def rollouts(
        self, *, judged: bool | None = None, step_tokens: int | None = None
    ) -> AbstractAsyncContextManager[tuple[CompareRollout, SplitScenarios]]:
        """Start the server, and give the rollout function and the scenarios. `step_tokens`: limit of a message of a step of
        `model`."""
        ...


@dataclass(frozen=True)
class RolloutTarget:
    """A rollout function as a ComparableTarget. `judge` may score its rollouts."""

    rollout: CompareRollout
    reward: RewardFunction | None = None
    judge: Judge | None = None

    def own_models(self) -> tuple[TrainableModel, ...]:
        """Empty: a rollout function has no model."""
        return ()

    def own_judge(self) -> Judge | None:
        """The judge."""
        return self.judge

    def max_concurrency(self) -> int | None:
        """None: no limit."""
        return None

    async def rollout_by(
        self, models: Sequence[Model[Any]], scenario: object, trajectory: Trajectory, *, judged: bool
    ) -> Trajectory:
        """Call the function and set the reward. Raises RolloutError for another result, or one without a reward."""
        if models[0].trainable:
            result_trajectory = await self.rollout(models[0], scenario)
        else:
            with capturing(trajectory):
                result_trajectory = await self.rollout(models[0], scenario)
        if not isinstance(result_trajectory, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
            raise RolloutError(f"the rollout returned {result_trajectory!r:.200}; it must return a Trajectory")
        if self.reward is not None and result_trajectory.exception is None:
            value = self.reward(scenario, result_trajectory)
            result = as_reward(await value if inspect.isawaitable(value) else value, "reward=")
            result_trajectory.reward = result.reward + (logged_reward(result_trajectory) or 0.0)
            result_trajectory.metrics.update(result.metrics)
        if result_trajectory.reward is None and result_trajectory.exception is None and not judged:
            raise RolloutError("the rollout has no reward: set trajectory.reward, pass reward=, or compare with judge=")
        return result_trajectory if result_trajectory.ended_at is not None else result_trajectory.finish()


def answering_itself(app: ComparableTarget) -> SelfAnswering:
    """The app that runs on its own models. Raises ConfigError for a target that has none."""
    if not isinstance(app, SelfAnswering):
        raise ConfigError(
            "candidates: as-is: only what offbook_langgraph.trainable(...) returned has models of its own"
        )
    return app


def trained_models(app: ComparableTarget, model: TrainableModel | None) -> tuple[TrainableModel, ...]:
    """The models whose steps are candidates: `model`, else the app's own. Raises ConfigError for one in place of several."""
    own = app.own_models()
    if model is None:
        return own
    if len(own) > 1:
        raise ConfigError("model: the app has several models of its own, which one name cannot replace: leave it out")
    return (model,)


def as_target(target: ComparableTarget | CompareRollout, reward: RewardFunction | None) -> ComparableTarget:
    """Return a wrapped app unchanged, and a rollout function as a RolloutTarget. Raises ConfigError."""
    if isinstance(target, ComparableTarget) and not isinstance(target, type):
        if reward is not None:
            raise ConfigError("reward: it belongs to a rollout function; a wrapped app has its own")
        return target
    if not callable(target) or isinstance(target, type):
        raise ConfigError(
            f"target: a wrapped app or `async def rollout(model, scenario)` is needed, got {type(target).__name__} "
            f"{target!r:.100}"
        )
    return RolloutTarget(target, reward)


def load_app(text: str) -> ComparableTarget:
    """The app `module:name`. Raises ConfigError for another object."""
    app: object = load_target(text)
    if not isinstance(app, ComparableTarget):
        raise ConfigError(
            f"target: {text} is of type {type(app).__name__}, whose calls other models cannot answer: name the "
            "object that offbook_langgraph.trainable(...) returned"
        )
    return app


def load_server(text: str, **options: Any) -> ServerTarget | None:
    """The server after `mcp:`, with the options of an `offbook_mcp.MCPTrainer`; None for another text.

    Raises ConfigError, MissingExtraError."""
    if not text.startswith(MCP):
        return None
    named: Any = importlib.import_module("offbook_mcp.commands.options")
    return named.named_trainer(text.removeprefix(MCP), **options)
