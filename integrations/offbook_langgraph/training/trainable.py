"""`trainable`: wraps a function or a graph so that it can be trained; otherwise it behaves as before."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar, cast, overload

from langchain_core.runnables import Runnable
from langgraph.graph import StateGraph  # pyright: ignore[reportMissingTypeStubs]

from offbook import (
    Model,
    TrainableModel,
    Trainer,
    Trajectory,
    TrajectoryGroup,
)
from offbook.base.errors import ConfigError, RolloutError
from offbook.base.options import option, takes
from offbook.contracts import Judge
from offbook.trainer.evaluate import Evaluation
from offbook.trainer.judging import check_judge
from offbook.trainer.options import EvaluateOptions, TrainerOptions, TrainOptions
from offbook.trainer.report import TrainReport
from offbook_langgraph.calls.capture_block import (
    Answerers,
    Models,
    by_model,
    check_choice,
    check_length,
)
from offbook_langgraph.calls.origins import OWN_MODEL, OriginCounts, as_predicate
from offbook_langgraph.chat_model import Answering

from .rollout import (
    Agent,
    FunctionAgent,
    GraphAgent,
    TrainableOptions,
)
from .serving import (
    Serving,
    ServingOptions,
    served_runnable,
    serving_function,
    subclassed,
)

logger = logging.getLogger("offbook")


class AgentTrainer(Trainer):
    """A Trainer that raises RolloutError when a selection matches no call.

    A misspelt selection would send the calls to the app's own model.
    """

    def __init__(
        self,
        models: Sequence[TrainableModel],
        rollout: Callable[[object, Any], Awaitable[Trajectory]],
        scenarios: Iterable[object],
        counts: OriginCounts,
        options: Mapping[str, Any],
    ) -> None:
        model = models[0] if len(models) == 1 else models
        super().__init__(cast(Any, model), rollout, scenarios, **options)
        self._counts = counts
        self._examined = False

    def examine_rollouts(self, groups: Sequence[TrajectoryGroup]) -> str | None:
        """After the first iteration, report the calls that went to the app's own model; None otherwise.

        Raises RolloutError when a selection matched no call.
        """
        if self._examined:
            return None
        self._examined = True
        self._check_taken()
        idle = self._idle() if any(rollout.reward is not None for group in groups for rollout in group) else []
        if idle and not self._counts.total:
            raise RolloutError(
                "no rollout of the first iteration called a LangChain chat model, so there is nothing to train: the wrapped "
                "function must run the app on its scenario"
            )
        if idle:
            raise RolloutError(
                f"model={{...}}: the selection of {', '.join(idle)} took no call in the first iteration. Where its part of the "
                "app is rarely reached, take more rollouts for an iteration (scenarios_per_step=, group_size=). The calls "
                f"were:\n{self._counts.lines()}"
            )
        return self._own_model_line()

    def examine_evaluation(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Log the calls that went to the app's own model. Raises RolloutError when no call went to a trained model."""
        self._check_taken()
        if not self._examined and (line := self._own_model_line()):
            logger.info(line)

    def _idle(self) -> list[str]:
        return [model.name for model in self.models if not self._counts.to(model.name)]

    def _check_taken(self) -> None:
        if self._counts.total and len(self._idle()) == len(self.models):
            raise RolloutError(
                "select=, exclude=: no call went to the policy, so this would be a run of the app's own models. The calls "
                f"were:\n{self._counts.lines()}"
            )

    def _own_model_line(self) -> str | None:
        count = self._counts.to(OWN_MODEL)
        if not count:
            return None
        calls = (
            "1 call that select= does not take went" if count == 1 else f"{count} calls that select= does not take went"
        )
        return f"{calls} to {OWN_MODEL}:\n{self._counts.lines(OWN_MODEL)}"


@dataclass(frozen=True)
class AppRollout:
    """The rollout function of a wrapped app. The origins of its calls are added to `counts`."""

    options: TrainableOptions
    agent: Agent
    judged: bool
    counts: OriginCounts

    async def __call__(self, _: object, scenario: object) -> Trajectory:
        """Run the app once."""
        return await self.options.rollout(self.agent, scenario, self.judged, self.counts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it for one rollout, with counts of its own."""
        return AppRollout, (self.options, self.agent, self.judged, OriginCounts())

    def collected(self) -> OriginCounts:
        """The counts of a rollout in a process of its own."""
        return self.counts

    def collect(self, collected: OriginCounts) -> None:
        """Add the counts of a rollout of another process."""
        self.counts.merge(collected)


P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class AppTrainerArguments(TrainerOptions):
    """The arguments of `trainer`."""

    scenarios: Iterable[object]
    _: KW_ONLY
    model: Models | None = option(None, "the model of an app that was wrapped without one, or another than its own")


@dataclass(frozen=True)
class AppTrainArguments(AppTrainerArguments, TrainOptions):
    """The arguments of `train`."""


@dataclass(frozen=True)
class AppEvaluateArguments(AppTrainerArguments, EvaluateOptions):
    """The arguments of `evaluate`."""


class TrainingMethods:
    """The training methods of a wrapped function or graph.

    They take the options of `offbook.Trainer`. `model=` names the model for an agent that was wrapped without one, or
    replaces it.
    """

    __slots__ = ()
    _app_options: TrainableOptions

    def _agent(self) -> Agent:
        raise NotImplementedError

    @takes(AppTrainerArguments, "train")
    def trainer(self, options: AppTrainerArguments) -> Trainer:
        """Create the Trainer that `train` runs. Raises ConfigError for a mistake that would fail every rollout."""
        return self._trainer(options)

    def _trainer(self, options: AppTrainerArguments) -> Trainer:
        wrapped = self._app_options if options.model is None else replace(self._app_options, model=options.model)
        agent = self._agent()
        chosen: dict[str, Any] = {"judge": wrapped.judge, **options.passed_to(TrainerOptions)}
        if wrapped.max_completion_tokens is not None:
            chosen.setdefault("max_completion_tokens", wrapped.max_completion_tokens)
        judged = chosen["judge"] is not None or options.reward is not None
        check_scored(wrapped, agent, judged)
        models = tuple(by_model(wrapped.models(), wrapped.select))
        if wrapped.scope == "process" and chosen.setdefault("concurrency", 1) != 1:
            raise ConfigError(f'concurrency: scope="process" runs one rollout at a time, got {chosen["concurrency"]!r}')

        counts = OriginCounts()

        return AgentTrainer(models, AppRollout(wrapped, agent, judged, counts), options.scenarios, counts, chosen)

    @takes(AppTrainArguments, "train")
    def train(self, options: AppTrainArguments) -> TrainReport:
        """Train until the model has `steps` steps in total. In a notebook use `await atrain(...)`."""
        return self._trainer(options).train(options.steps)

    @takes(AppTrainArguments, "train")
    async def atrain(self, options: AppTrainArguments) -> TrainReport:
        """Train until the model has `steps` steps in total. A second run resumes at the newest step.

        Raises ConfigError, CaptureError, RolloutError (too many failed rollouts), ServerError.
        """
        return await self._trainer(options).atrain(options.steps)

    @takes(AppEvaluateArguments, "evaluate")
    def evaluate(self, options: AppEvaluateArguments) -> Evaluation:
        """Run and score each scenario with the newest step. In a notebook use `await aevaluate(...)`."""
        trainer = self._trainer(options)
        return trainer.evaluate(trainer.scenarios, temperature=options.temperature, rollouts=options.rollouts)

    @takes(AppEvaluateArguments, "evaluate")
    async def aevaluate(self, options: AppEvaluateArguments) -> Evaluation:
        """Run and score each scenario `rollouts` times with the newest step: greedy at temperature 0, sampled above it."""
        trainer = self._trainer(options)
        return await trainer.aevaluate(trainer.scenarios, temperature=options.temperature, rollouts=options.rollouts)

    def own_models(self) -> tuple[TrainableModel, ...]:
        """The trained models; empty when it was wrapped without one."""
        options = self._app_options
        return () if options.model is None else tuple(by_model(options.model, options.select))

    def own_judge(self) -> Judge | None:
        """The judge passed to `trainable`."""
        return self._app_options.judge

    def max_concurrency(self) -> int | None:
        """How many rollouts may run at once; None means no limit."""
        return 1 if self._app_options.scope == "process" else None

    async def rollout_by(
        self, models: Sequence[Model[Any]], scenario: object, trajectory: Trajectory, *, judged: bool
    ) -> Trajectory:
        """Run one rollout for `offbook_compare.compare`. `models` answer in place of `own_models`, in the same order."""
        options, agent, answering = self._app_options, self._agent(), cast(Sequence[Answering], models)
        check_scored(options, agent, judged)
        answerers: Answerers = answering[0]
        if isinstance(options.model, Mapping):
            answerers = dict(zip(answering, options.model.values(), strict=True))
        return await options.rollout(
            agent, scenario, judged, OriginCounts(), trajectory=trajectory, answerers=answerers
        )

    async def rollout_as_is(self, scenario: object, trajectory: Trajectory, *, judged: bool) -> Trajectory:
        """Run one rollout for `offbook_compare.compare` on the app's own models."""
        options, agent = self._app_options, self._agent()
        check_scored(options, agent, judged)
        return await options.rollout(agent, scenario, judged, OriginCounts(), trajectory=trajectory, as_is=True)

    def _serving(self, served: ServingOptions) -> Serving:
        options = self._app_options if served.model is None else replace(self._app_options, model=served.model)
        return Serving(by_model(options.models(), options.select), as_predicate(options.exclude, "exclude"), served)


class TrainableFunction(TrainingMethods, Generic[P, R]):
    """The wrapped function with `train`, `evaluate` and `trained`. Calling it runs the function on the app's own model."""

    def __init__(self, function: Callable[P, R], options: TrainableOptions) -> None:
        self._function = function
        self._app_options = options
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def __get__(self, owner: object | None, kind: type | None = None) -> TrainableFunction[..., R]:
        """Bind a wrapped method to its object, as plain functions do."""
        if owner is None:
            return self
        bound = functools.partial(cast(Callable[..., R], self._function), owner)
        functools.update_wrapper(bound, self._function)
        return type(self)(bound, self._app_options)

    def _agent(self) -> FunctionAgent:
        options = self._app_options
        return FunctionAgent(self._function, options.to_input, options.on_interrupt, options.context)

    @takes(ServingOptions, "trained")
    def trained(self, options: ServingOptions) -> Callable[P, R]:
        """Return the function with its chat models answered by the trained model. Nothing is recorded."""
        return serving_function(self._function, self._serving(options))


class TrainableCoroutineFunction(TrainableFunction[P, R]):
    """A wrapped async function. LangGraph's `add_node` and `iscoroutinefunction` still see an async function."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:  # type: ignore[override]  # awaits what R is
        return await cast(Callable[P, Any], self._function)(*args, **kwargs)


class TrainableRunnable(TrainingMethods, Runnable[Any, Any]):
    """Mixed into the class of a wrapped graph. The graph stays a Runnable on the app's own model."""

    def _agent(self) -> GraphAgent:
        return GraphAgent(self, self._app_options.to_input, self._app_options.on_interrupt, self._app_options.context)

    @takes(ServingOptions, "trained")
    def trained(self, options: ServingOptions) -> Any:
        """Return the graph with its chat models answered by the trained model. Nothing is recorded."""
        return served_runnable(self, self._serving(options))


@dataclass(frozen=True)
class TrainableArguments(TrainableOptions):
    """The arguments of `trainable`."""

    target: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trainable(self)


@overload
@takes(TrainableOptions, "trainable")
def trainable(target: Runnable[Any, Any], options: TrainableOptions) -> TrainableRunnable: ...


@overload
@takes(TrainableOptions, "trainable")
def trainable(target: Callable[P, R], options: TrainableOptions) -> TrainableFunction[P, R]: ...


@overload
@takes(TrainableOptions, "trainable")
def trainable(options: TrainableOptions) -> Callable[[Callable[P, R]], TrainableFunction[P, R]]: ...


@takes(TrainableArguments, "trainable")
def trainable(options: TrainableArguments) -> Any:
    """Make a function of one scenario, or a graph, trainable. Can be used as a decorator.

    Raises ConfigError for an unknown or invalid option, and for a target that cannot be wrapped.
    """
    if options.target is None:
        return functools.partial(wrap, options=options)
    return wrap(options.target, options)


def check_trainable(options: TrainableOptions) -> None:
    """Raise ConfigError for an invalid option of `trainable`."""
    for name in ("scope", "on_leak", "shared_state"):
        check_choice(name, getattr(options, name))
    as_predicate(options.exclude, "exclude")
    check_length(options.max_completion_tokens)
    if options.judge is not None:
        check_judge(options.judge)
    if options.model is not None:
        by_model(options.model, options.select)
    if options.reward is not None and not callable(options.reward) and options.reward != "logged":
        raise ConfigError(
            f'reward: a function (scenario, output) -> number, or "logged", is needed, got {options.reward!r}'
        )
    if isinstance(options.context, type):
        raise ConfigError(
            f"context: pass an instance of {options.context.__name__}, or a function from the scenario to one; got the class"
        )
    for name in ("to_input", "on_interrupt", "train_on"):
        if getattr(options, name) is not None and not callable(getattr(options, name)):
            raise ConfigError(f"{name}: a function is needed, got {getattr(options, name)!r}")


def wrap(target: Any, options: TrainableOptions) -> Any:
    """Wrap a function or a graph. Raises ConfigError, with the fix, for a target that cannot be wrapped."""
    if isinstance(target, TrainingMethods):
        raise ConfigError(f"trainable: {target!r} is wrapped already; call trainable once")
    if isinstance(target, Runnable):
        return subclassed(target, TrainableRunnable, _app_options=options)
    if isinstance(target, type):
        fix = "wrap an instance" if issubclass(target, Runnable) else "wrap its method or an instance's method"
        raise ConfigError(f"trainable: {target.__name__} is a class; {fix}")
    if isinstance(target, StateGraph):
        raise ConfigError("trainable: the graph is not compiled: trainable(graph.compile(), ...)")
    if not callable(target):
        problem = f"trainable: a function or a compiled graph is needed, got {type(target).__name__} {target!r}"
        fix = ": pass it as trainable(model=...)" if isinstance(target, TrainableModel) else ""
        raise ConfigError(problem + fix)
    for function in (target, target.__call__):
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            name = getattr(target, "__name__", type(target).__name__)
            raise ConfigError(f"trainable: {name} is a generator; wrap a function that returns once it has ended")
    if inspect.iscoroutinefunction(inspect.unwrap(target)):
        return TrainableCoroutineFunction[..., Any](target, options)
    return TrainableFunction[..., Any](target, options)


def check_scored(options: TrainableOptions, agent: Agent, judged: bool) -> None:
    """Raise ConfigError for an agent whose rollouts would have no reward."""
    if options.reward is not None or judged:
        return
    if agent.returns_output:
        raise ConfigError(
            "reward: a graph returns its state, not a reward: pass trainable(graph, reward=(scenario, output) -> number), "
            'reward="logged" if it calls offbook.log_reward, or judge='
        )
