"""`trainable`: a function or a compiled graph that can be trained, and otherwise is what it was."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, cast, overload

from langchain_core.runnables import Runnable

from understudy.client.model import TrainableModel
from understudy.errors import ConfigError
from understudy.trainer.evaluate import Evaluation
from understudy.trainer.report import TrainReport
from understudy.trainer.trainer import Trainer, TrainerOptions, refuse_running_loop
from understudy.types import Trajectory

from .capture import Select
from .rollout import FunctionAgent, GraphAgent, Plan, Reward
from .serving import Serving, served_runnable, serving_function, subclassed

P = ParamSpec("P")
R = TypeVar("R")


class Training:
    """The training methods of a wrapped function or graph. Options are those of `understudy.Trainer`."""

    __slots__ = ()
    _plan: Plan

    def _agent(self) -> FunctionAgent | GraphAgent:
        raise NotImplementedError

    def trainer(self, scenarios: Sequence[object], **options: Unpack[TrainerOptions]) -> Trainer:
        """The Trainer that `train` runs."""
        agent = self._agent()
        if isinstance(agent, GraphAgent) and self._plan.reward is None and options.get("judge") is None:
            raise ConfigError(
                "reward: a graph returns its state, not a reward; pass trainable(graph, reward=...) or judge="
            )

        async def rollout(model: TrainableModel, scenario: object) -> Trajectory:
            return await self._plan.rollout(agent, scenario)

        return Trainer(self._plan.model, rollout, scenarios, **options)

    def train(self, scenarios: Sequence[object], *, steps: int = 50, **options: Unpack[TrainerOptions]) -> TrainReport:
        """Train until the model has made `steps` steps in all. In a notebook: `await atrain(...)`."""
        refuse_running_loop("train", "atrain")
        return asyncio.run(self.atrain(scenarios, steps=steps, **options))

    async def atrain(
        self, scenarios: Sequence[object], *, steps: int = 50, **options: Unpack[TrainerOptions]
    ) -> TrainReport:
        """Train until the model has made `steps` steps in all; run again, it goes on from where it was."""
        return await self.trainer(scenarios, **options).atrain(steps)

    def evaluate(
        self,
        scenarios: Sequence[object],
        *,
        temperature: float | None = 0.0,
        rollouts: int = 1,
        **options: Unpack[TrainerOptions],
    ) -> Evaluation:
        """Run and score each scenario with the newest step. In a notebook: `await aevaluate(...)`."""
        refuse_running_loop("evaluate", "aevaluate")
        return asyncio.run(self.aevaluate(scenarios, temperature=temperature, rollouts=rollouts, **options))

    async def aevaluate(
        self,
        scenarios: Sequence[object],
        *,
        temperature: float | None = 0.0,
        rollouts: int = 1,
        **options: Unpack[TrainerOptions],
    ) -> Evaluation:
        """Run and score each scenario with the newest step: greedy at temperature 0, sampled at 1."""
        trainer = self.trainer(scenarios, **options)
        return await trainer.aevaluate(scenarios, temperature=temperature, rollouts=rollouts)

    def _serving_by(self, step: int | None, temperature: float | None) -> Serving:
        return Serving(self._plan.model, step, temperature)


class TrainableFunction(Training, Generic[P, R]):
    """The function, with `train`, `evaluate` and `trained`. Called, it runs as it always did, on its own model."""

    def __init__(self, function: Callable[P, R], plan: Plan) -> None:
        self._function = function
        self._plan = plan
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __get__(self, owner: object | None, kind: type | None = None) -> TrainableFunction[..., R]:
        """A method: bound to its object, like any function."""
        if owner is None:
            return self
        bound = functools.partial(cast(Callable[..., R], self._function), owner)
        functools.update_wrapper(bound, self._function)
        return TrainableFunction(bound, self._plan)

    def _agent(self) -> FunctionAgent:
        return FunctionAgent(self._function)

    def trained(self, step: int | None = None, *, temperature: float | None = None) -> Callable[P, R]:
        """The same function, its models answered by the newest step, or by step `step`. Nothing is recorded."""
        return serving_function(self._function, self._serving_by(step, temperature))


class TrainableRunnable(Training, Runnable[Any, Any]):
    """Mixed into the graph's own class: it stays the Runnable it was, on its own model, and can be trained."""

    def _agent(self) -> GraphAgent:
        return GraphAgent(self, self._plan.to_input)

    def trained(self, step: int | None = None, *, temperature: float | None = None) -> Any:
        """The same graph, its models answered by the newest step, or by step `step`. Nothing is recorded."""
        return served_runnable(self, self._serving_by(step, temperature))


@overload
def trainable(
    target: Runnable[Any, Any],
    *,
    model: TrainableModel,
    reward: Reward | None = None,
    select: Select | None = None,
    to_input: Callable[[Any], Any] | None = None,
    temperature: float = 1.0,
) -> TrainableRunnable: ...


@overload
def trainable(
    target: Callable[P, R],
    *,
    model: TrainableModel,
    reward: Reward | None = None,
    select: Select | None = None,
    temperature: float = 1.0,
) -> TrainableFunction[P, R]: ...


@overload
def trainable(
    *,
    model: TrainableModel,
    reward: Reward | None = None,
    select: Select | None = None,
    temperature: float = 1.0,
) -> Callable[[Callable[P, R]], TrainableFunction[P, R]]: ...


def trainable(
    target: Any = None,
    *,
    model: TrainableModel,
    reward: Reward | None = None,
    select: Select | None = None,
    to_input: Callable[[Any], Any] | None = None,
    temperature: float = 1.0,
) -> Any:
    """Make a function of one scenario (also as a decorator) or a compiled graph trainable by `model`.

    The function returns the reward, or its output when `reward=(scenario, output)` is given; a graph needs `reward`.
    """
    if target is None:
        return functools.partial(
            trainable, model=model, reward=reward, select=select, to_input=to_input, temperature=temperature
        )
    plan = Plan(model, reward, select, to_input, temperature)
    if isinstance(target, Runnable):
        return subclassed(target, TrainableRunnable, _plan=plan)
    if isinstance(target, type):
        raise ConfigError(f"trainable: {target.__name__} is a class; wrap its method or an instance's method")
    if inspect.isgeneratorfunction(target) or inspect.isasyncgenfunction(target):
        raise ConfigError(
            f"trainable: {target.__name__} is a generator; wrap a function that returns once it has ended"
        )
    if not callable(target):
        raise ConfigError(
            f"trainable: a function or a compiled graph is needed, got {type(target).__name__} {target!r}"
        )
    if to_input is not None:
        raise ConfigError("to_input: for graphs only; a function is handed the scenario as it is")
    return TrainableFunction(target, plan)
