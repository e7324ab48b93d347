"""`trainable`: a function or a graph that can be trained, and otherwise is what it was."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, cast, get_type_hints, overload

from langchain_core.runnables import Runnable
from langgraph.graph import StateGraph  # pyright: ignore[reportMissingTypeStubs]

from understudy import Model, TrainableModel, Trainer, Trajectory
from understudy.integration import ConfigError, Evaluation, Judge, TrainerOptions, TrainReport

from .active_capture import OnLeak, Scope, SharedState
from .agent_trainer import AgentTrainer
from .agents import Agent, FunctionAgent, GraphAgent, OnInterrupt, ToContext, ToInput
from .capture_block import Answerers, Models, by_model, check_choice, check_length
from .endpoint import Answering
from .ledger import TrainOn
from .origin_counts import OriginCounts
from .rollout import Reward, TrainingPlan
from .selection import Selection, as_predicate
from .serving import Serving, served_runnable, serving_function, subclassed

P = ParamSpec("P")
R = TypeVar("R")


class TrainingMethods:
    """The training methods of a wrapped function or graph. Options are those of `understudy.Trainer`, and `model=`, for
    an agent that was wrapped without one."""

    __slots__ = ()
    _plan: TrainingPlan

    def _agent(self) -> Agent:
        raise NotImplementedError

    def trainer(
        self, scenarios: Sequence[object], *, model: Models | None = None, **options: Unpack[TrainerOptions]
    ) -> Trainer:
        """The Trainer that `train` runs. Raises ConfigError for what would fail in every rollout."""
        plan = self._plan if model is None else replace(self._plan, model=model)
        agent = self._agent()
        own: dict[str, object] = {"judge": plan.judge}
        if plan.max_completion_tokens is not None:
            own["max_completion_tokens"] = plan.max_completion_tokens
        options = cast(TrainerOptions, {**own, **options})
        judged = options.get("judge") is not None or options.get("reward") is not None
        check_scored(plan, agent, judged)
        models = tuple(by_model(plan.models(), plan.select))
        if plan.scope == "process" and options.setdefault("concurrency", 1) != 1:
            raise ConfigError(
                f'concurrency: scope="process" runs one rollout at a time, got {options.get("concurrency")!r}'
            )

        counts = OriginCounts()

        async def rollout(_: object, scenario: object) -> Trajectory:
            return await plan.rollout(agent, scenario, judged, counts)

        return AgentTrainer(models, rollout, scenarios, counts, options)

    def train(
        self,
        scenarios: Sequence[object],
        *,
        steps: int = 50,
        model: Models | None = None,
        **options: Unpack[TrainerOptions],
    ) -> TrainReport:
        """Train until the model has made `steps` steps in all. In a notebook: `await atrain(...)`."""
        return self.trainer(scenarios, model=model, **options).train(steps)

    async def atrain(
        self,
        scenarios: Sequence[object],
        *,
        steps: int = 50,
        model: Models | None = None,
        **options: Unpack[TrainerOptions],
    ) -> TrainReport:
        """Train until the model has made `steps` steps in all; run again, it goes on from where it was."""
        return await self.trainer(scenarios, model=model, **options).atrain(steps)

    def evaluate(
        self,
        scenarios: Sequence[object],
        *,
        temperature: float | None = 0.0,
        rollouts: int = 1,
        model: Models | None = None,
        **options: Unpack[TrainerOptions],
    ) -> Evaluation:
        """Run and score each scenario with the newest step. In a notebook: `await aevaluate(...)`."""
        trainer = self.trainer(scenarios, model=model, **options)
        return trainer.evaluate(scenarios, temperature=temperature, rollouts=rollouts)

    async def aevaluate(
        self,
        scenarios: Sequence[object],
        *,
        temperature: float | None = 0.0,
        rollouts: int = 1,
        model: Models | None = None,
        **options: Unpack[TrainerOptions],
    ) -> Evaluation:
        """Run and score each scenario with the newest step: greedy at temperature 0, sampled at 1."""
        trainer = self.trainer(scenarios, model=model, **options)
        return await trainer.aevaluate(scenarios, temperature=temperature, rollouts=rollouts)

    def own_models(self) -> tuple[TrainableModel, ...]:
        """The models that are trained in it; none where it was wrapped without."""
        plan = self._plan
        return () if plan.model is None else tuple(by_model(plan.model, plan.select))

    def own_judge(self) -> Judge | None:
        """The judge that it was wrapped with."""
        return self._plan.judge

    def most_at_once(self) -> int | None:
        """How many rollouts may run at once; None: any number."""
        return 1 if self._plan.scope == "process" else None

    async def rollout_by(
        self, models: Sequence[Model[Any]], scenario: object, trajectory: Trajectory, *, judged: bool
    ) -> Trajectory:
        """One rollout for `understudy.compare`: these models answer, one for each of `own_models`."""
        plan, agent, given = self._plan, self._agent(), cast(Sequence[Answering], models)
        check_scored(plan, agent, judged)
        answerers: Answerers = given[0]
        if isinstance(plan.model, Mapping):
            answerers = dict(zip(given, plan.model.values(), strict=True))
        return await plan.rollout(agent, scenario, judged, OriginCounts(), trajectory=trajectory, answerers=answerers)

    def _serving(
        self,
        step: int | Mapping[str, int] | None,
        url: str | None,
        api_key: str | None,
        temperature: float | None,
        model: Models | None,
    ) -> Serving:
        plan = self._plan if model is None else replace(self._plan, model=model)
        models = by_model(plan.models(), plan.select)
        return Serving(models, as_predicate(plan.exclude, "exclude"), step, temperature, url, api_key)


class TrainableFunction(TrainingMethods, Generic[P, R]):
    """The function, with `train`, `evaluate` and `trained`. Called, it runs as it always did, on its own model."""

    def __init__(self, function: Callable[P, R], plan: TrainingPlan) -> None:
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
        return type(self)(bound, self._plan)

    def _agent(self) -> FunctionAgent:
        plan = self._plan
        return FunctionAgent(self._function, plan.to_input, plan.on_interrupt, plan.context)

    def trained(
        self,
        step: int | Mapping[str, int] | None = None,
        *,
        url: str | None = None,
        api_key: str | None = None,
        temperature: float | None = None,
        model: Models | None = None,
    ) -> Callable[P, R]:
        """The same function, its models answered by the newest step, or by step `step`: of the model's own server, or of
        the one at `url`. Nothing is recorded."""
        return serving_function(self._function, self._serving(step, url, api_key, temperature, model))


class TrainableCoroutineFunction(TrainableFunction[P, R]):
    """The same for an async function, which it still is for whoever asks (`add_node`, `iscoroutinefunction`)."""

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:  # type: ignore[override]  # awaits what R is
        return await cast(Callable[P, Any], self._function)(*args, **kwargs)


class TrainableRunnable(TrainingMethods, Runnable[Any, Any]):
    """Mixed into the graph's own class: it stays the Runnable it was, on its own model, and can be trained."""

    def _agent(self) -> GraphAgent:
        return GraphAgent(self, self._plan.to_input, self._plan.on_interrupt, self._plan.context)

    def trained(
        self,
        step: int | Mapping[str, int] | None = None,
        *,
        url: str | None = None,
        api_key: str | None = None,
        temperature: float | None = None,
        model: Models | None = None,
    ) -> Any:
        """The same graph, its models answered by the newest step, or by step `step`: of the model's own server, or of
        the one at `url`. Nothing is recorded."""
        return served_runnable(self, self._serving(step, url, api_key, temperature, model))


class TrainableOptions(TypedDict, total=False):
    """The options of `trainable`."""

    model: Models | None
    reward: Reward | None
    judge: Judge | None
    select: Selection | None
    exclude: Selection | None
    to_input: ToInput | None
    on_interrupt: OnInterrupt | None
    context: ToContext | object
    temperature: float
    max_completion_tokens: int | None
    scope: Scope
    on_leak: OnLeak
    shared_state: SharedState
    train_on: TrainOn | None


@overload
def trainable(target: Runnable[Any, Any], **options: Unpack[TrainableOptions]) -> TrainableRunnable: ...


@overload
def trainable(target: Callable[P, R], **options: Unpack[TrainableOptions]) -> TrainableFunction[P, R]: ...


@overload
def trainable(**options: Unpack[TrainableOptions]) -> Callable[[Callable[P, R]], TrainableFunction[P, R]]: ...


def trainable(target: Any = None, **options: Unpack[TrainableOptions]) -> Any:
    """Make a function of one scenario (also as a decorator) or a graph trainable.

    model: the TrainableModel; or several, each with its own calls: `{planner: {"node": "plan"}, writer: {...}}`.
    reward: (scenario, output) -> a number, a dict with `reward`, or a RewardResult. Without it a function returns the
        reward itself; a graph needs it, or "logged" where the graph calls `understudy.log_reward`, or `judge`.
    judge: an async function from a finished group to the group with rewards.
    select, exclude: which of the app's calls go to the policy; see `Selection`.
    to_input: scenario -> what a graph is invoked with. on_interrupt: the value of an interrupt -> what resumes it.
    context: the run-scoped context of a graph with a `context_schema`; or scenario -> context.
    temperature: at which rollouts are sampled. max_completion_tokens: of one call, where the app sets no smaller limit;
        None: 1,024. That of `train(...)` goes before it.
    scope, on_leak, shared_state, train_on: see `capture`.
    """
    plan = checked_plan(options)
    if target is None:
        return functools.partial(made, plan=plan)
    return made(target, plan)


def checked_plan(options: TrainableOptions) -> TrainingPlan:
    """The options as a plan. Raises ConfigError."""
    known = [each.name for each in fields(TrainingPlan)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"trainable: there is no option {unknown[0]!r}; there are {', '.join(known)}")
    plan = TrainingPlan(**options)
    for option in ("scope", "on_leak", "shared_state"):
        check_choice(option, getattr(plan, option))
    as_predicate(plan.exclude, "exclude")
    check_length(plan.max_completion_tokens)
    if plan.model is not None:
        by_model(plan.model, plan.select)
    if plan.reward is not None and not callable(plan.reward) and plan.reward != "logged":
        raise ConfigError(
            f'reward: a function (scenario, output) -> number, or "logged", is needed, got {plan.reward!r}'
        )
    if isinstance(plan.context, type):
        raise ConfigError(
            f"context: an instance of {plan.context.__name__} or (scenario) -> one is needed, got the class"
        )
    for option in ("to_input", "on_interrupt", "train_on"):
        if getattr(plan, option) is not None and not callable(getattr(plan, option)):
            raise ConfigError(f"{option}: a function is needed, got {getattr(plan, option)!r}")
    return plan


def made(target: Any, plan: TrainingPlan) -> Any:
    """What `trainable` returns. Raises ConfigError for what cannot be wrapped, with the fix."""
    if isinstance(target, TrainingMethods):
        raise ConfigError(f"trainable: {target!r} is wrapped already")
    if isinstance(target, Runnable):
        return subclassed(target, TrainableRunnable, _plan=plan)
    if isinstance(target, type):
        raise ConfigError(f"trainable: {target.__name__} is a class; wrap its method or an instance's method")
    if isinstance(target, StateGraph):
        raise ConfigError("trainable: the graph is not compiled: trainable(graph.compile(), ...)")
    if not callable(target):
        raise ConfigError(
            f"trainable: a function or a compiled graph is needed, got {type(target).__name__} {target!r}"
        )
    for each in (target, target.__call__):
        if inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each):
            name = getattr(target, "__name__", type(target).__name__)
            raise ConfigError(f"trainable: {name} is a generator; wrap a function that returns once it has ended")
    if inspect.iscoroutinefunction(inspect.unwrap(target)):
        return TrainableCoroutineFunction[..., Any](target, plan)
    return TrainableFunction[..., Any](target, plan)


def check_scored(plan: TrainingPlan, agent: Agent, judged: bool) -> None:
    """Raise ConfigError for an agent whose rollouts could have no reward."""
    if plan.reward is not None or judged:
        return
    if agent.returns_output:
        raise ConfigError(
            "reward: a graph returns its state, not a reward: pass trainable(graph, reward=(scenario, output) -> number), "
            'reward="logged" if it calls understudy.log_reward, or judge='
        )
    if isinstance(agent, FunctionAgent) and _returns_nothing(agent.function):
        raise ConfigError(
            f"reward: {getattr(agent.function, '__name__', 'the function')} is annotated to return None: pass judge=, "
            'reward=(scenario, output) -> number, or reward="logged" if it calls understudy.log_reward'
        )


def _returns_nothing(function: Callable[..., Any]) -> bool:
    try:
        hints = get_type_hints(inspect.unwrap(function))
    except (NameError, TypeError, AttributeError):  # names that exist for type checkers only
        return False
    return "return" in hints and hints["return"] is type(None)
