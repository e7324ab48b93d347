"""What is compared: an app whose calls can be answered by any model."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from understudy.client.capture import capturing, logged_reward
from understudy.client.model import Model, TrainableModel
from understudy.contracts import Judge
from understudy.errors import ConfigError, RolloutError
from understudy.rewards.outcome import as_reward
from understudy.trainer.options import RewardFunction
from understudy.types import Trajectory


@runtime_checkable
class ComparableTarget(Protocol):
    """What `compare` needs of an app; everything `trainable` returns has it."""

    def own_models(self) -> tuple[TrainableModel, ...]:
        """The models that are trained in it; none where it was wrapped without."""
        ...

    def own_judge(self) -> Judge | None:
        """The judge that it was wrapped with."""
        ...

    def most_at_once(self) -> int | None:
        """How many rollouts may run at once; None: any number."""
        ...

    async def rollout_by(
        self, models: Sequence[Model[Any]], scenario: object, trajectory: Trajectory, *, judged: bool
    ) -> Trajectory:
        """One rollout whose calls these models answer, one for each of `own_models`, or one alone. Calls are recorded under
        `trajectory`."""
        ...


CompareRollout = Callable[[Any, Any], Awaitable[Trajectory]]
"""(model, scenario) -> the finished trajectory, as a Trainer takes it."""


@dataclass(frozen=True)
class RolloutTarget:
    """A rollout function, and the model whose steps are candidates."""

    rollout: CompareRollout
    model: TrainableModel | None = None
    reward: RewardFunction | None = None

    def own_models(self) -> tuple[TrainableModel, ...]:
        return () if self.model is None else (self.model,)

    def own_judge(self) -> Judge | None:
        return None

    def most_at_once(self) -> int | None:
        return None

    async def rollout_by(
        self, models: Sequence[Model[Any]], scenario: object, trajectory: Trajectory, *, judged: bool
    ) -> Trajectory:
        """The function's trajectory, with its reward."""
        if models[0].trainable:
            made = await self.rollout(models[0], scenario)
        else:
            with capturing(trajectory):
                made = await self.rollout(models[0], scenario)
        if not isinstance(made, Trajectory):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
            raise RolloutError(f"the rollout returned {made!r:.200}; it must return a Trajectory")
        if self.reward is not None and made.exception is None:
            value = self.reward(scenario, made)
            result = as_reward(await value if inspect.isawaitable(value) else value, "reward=")
            made.reward = result.reward + (logged_reward(made) or 0.0)
            made.metrics.update(result.metrics)
        if made.reward is None and made.exception is None and not judged:
            raise RolloutError("the rollout has no reward: set trajectory.reward, pass reward=, or compare by judge=")
        return made if made.ended_at is not None else made.finish()


def as_target(
    target: ComparableTarget | CompareRollout, model: TrainableModel | None, reward: RewardFunction | None
) -> ComparableTarget:
    """A wrapped app as it is; a rollout function with its model. Raises ConfigError."""
    if isinstance(target, ComparableTarget) and not isinstance(target, type):
        if model is not None or reward is not None:
            raise ConfigError("model, reward: they belong to a rollout function; a wrapped app has its own")
        return target
    if not callable(target) or isinstance(target, type):
        raise ConfigError(
            f"target: a wrapped app or `async def rollout(model, scenario)` is needed, got {type(target).__name__} "
            f"{target!r:.100}"
        )
    return RolloutTarget(target, model, reward)
