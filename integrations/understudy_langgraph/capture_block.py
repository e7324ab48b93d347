"""`capture`: a block of code whose chat model calls belong to one trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TypeAlias, cast

from understudy import TrainableModel, Trajectory
from understudy.integration import (
    MAX_COMPLETION_TOKENS,
    ConfigError,
    EndpointModel,
    capturing,
    completion_limit,
    logged_reward,
)

from .active_capture import ActiveCapture, CallRoute, OnLeak, Scope, SharedState, activated, active
from .endpoint import Answering, chat_model, in_own_loop
from .ledger import Ledger, TrainOn
from .origin_counts import OriginCounts
from .patches import install
from .selection import Predicate, Selection, as_predicate
from .tool_errors import explain

Models: TypeAlias = TrainableModel | Mapping[TrainableModel, Selection]
"""The model that is trained; or several, each with the calls that are its own: one LoRA per role."""

Answerers: TypeAlias = Answering | Mapping[Answering, Selection]
"""What answers in a comparison: in place of the model, or of each of several with its calls."""

CAPTURED = "captured_calls"
"""Metric of a trajectory: the calls that the policy answered."""
OPTIONS = {"scope": ("context", "process"), "on_leak": ("error", "warn", "ignore"), "shared_state": ("error", "allow")}


def by_model(models: Models, select: Selection | None) -> dict[TrainableModel, Predicate | None]:
    """Each model and what it takes. Raises ConfigError."""
    if isinstance(models, TrainableModel):
        return {models: as_predicate(select, "select")}
    if not isinstance(models, Mapping) or not models:  # pyright: ignore[reportUnnecessaryIsInstance]  # user input
        raise ConfigError(
            f"model: a TrainableModel, or a mapping of several to what each takes, is needed, got {type(models).__name__} "
            f"{models!r:.80}"
        )
    if select is not None:
        raise ConfigError(
            "select: with several models, each has its own selection: model={planner: {'node': 'plan'}, ...}"
        )
    for each in models:
        if not isinstance(each, TrainableModel):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"model: the keys must be TrainableModels, got {each!r}")
    return {each: as_predicate(taken, f"model[{each.name!r}]") for each, taken in models.items()}


def by_answerer(models: Models | Answerers, select: Selection | None) -> Mapping[Answering, Predicate | None]:
    """The same where other LLMs may answer in the models' place."""
    if isinstance(models, EndpointModel):
        return {models: as_predicate(select, "select")}
    if isinstance(models, Mapping) and models and all(isinstance(each, EndpointModel) for each in models):
        return {each: as_predicate(taken, f"model[{each.name!r}]") for each, taken in models.items()}
    return {**by_model(cast(Models, models), select)}


def check_choice(option: str, value: str) -> None:
    """Raise ConfigError for a value that the option does not have."""
    if value not in OPTIONS[option]:
        raise ConfigError(f"{option}: one of {', '.join(OPTIONS[option])} is needed, got {value!r}")


def check_length(max_completion_tokens: int | None) -> None:
    """Raise ConfigError for a limit that no completion could keep."""
    if max_completion_tokens is None:
        return
    if not isinstance(max_completion_tokens, int) or max_completion_tokens < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"max_completion_tokens: a whole number of at least 1 is needed, got {max_completion_tokens!r}"
        )


class capture:  # used like a function: `async with capture(model) as trajectory`
    """Inside, the app's selected chat model calls go to `model` and are recorded under one trajectory, which the block
    is given, and which shows their conversations when the block ends. Works with `with` and `async with`, around one
    rollout at a time; captures nest, and a call goes to the innermost that selects it.

    select, exclude: which calls (see `Selection`); the others stay on the app's own model.
    scope: "process" also sees threads and loops that ran before the block, one rollout at a time in the process.
    on_leak: what to do when a request to another LLM leaves past the capture. Raises LeakError.
    shared_state: whether two rollouts may meet in one thread or store namespace. Raises SharedStateError.
    max_completion_tokens: of one call, where the app sets no smaller limit; None: the Trainer's, 1,024 without one.
    train_on: origin -> weight of a call in training, or False; `origin.unused` says that its output was thrown away.
    """

    def __init__(
        self,
        model: Models | Answerers,
        *,
        select: Selection | None = None,
        exclude: Selection | None = None,
        scope: Scope = "context",
        trajectory: Trajectory | None = None,
        temperature: float | None = 1.0,
        max_completion_tokens: int | None = None,
        on_leak: OnLeak = "error",
        shared_state: SharedState = "error",
        train_on: TrainOn | None = None,
    ) -> None:
        for option, value in (("scope", scope), ("on_leak", on_leak), ("shared_state", shared_state)):
            check_choice(option, value)
        check_length(max_completion_tokens)
        self._models = by_answerer(model, select)
        self._exclude = as_predicate(exclude, "exclude")
        self._scope: Scope = scope
        self._trajectory = trajectory if trajectory is not None else Trajectory()
        self._temperature = temperature
        self._longest = max_completion_tokens
        self._on_leak: OnLeak = on_leak
        self._shared_state: SharedState = shared_state
        self._train_on = train_on
        self.counts = OriginCounts()
        self._ledger = Ledger()
        self._stack = ExitStack()
        self._used = False

    async def _routes(self) -> tuple[CallRoute, ...]:
        longest = self._longest or completion_limit() or MAX_COMPLETION_TOKENS
        targets = await asyncio.gather(*(chat_model(each, self._temperature, longest=longest) for each in self._models))
        return tuple(CallRoute(target, select) for target, select in zip(targets, self._models.values(), strict=True))

    async def __aenter__(self) -> Trajectory:
        return self._enter(await self._routes())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit(error)

    def __enter__(self) -> Trajectory:
        return self._enter(in_own_loop(self._routes()))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit(error)

    def _enter(self, routes: tuple[CallRoute, ...]) -> Trajectory:
        install()
        if self._used:
            raise ConfigError("this capture was used before: make one for each rollout, `with capture(model): ...`")
        self._used = True
        self._active = ActiveCapture(
            routes=routes,
            trajectory=self._trajectory,
            runs=self._ledger,
            counts=self.counts,
            exclude=self._exclude,
            on_leak=self._on_leak,
            shared_state=self._shared_state,
            outer=active(),
        )
        self._stack.enter_context(capturing(self._trajectory, process=self._scope == "process"))
        self._stack.enter_context(activated(self._active, self._scope))
        return self._trajectory

    def _exit(self, error: BaseException | None) -> None:
        """Close the trajectory's account; a fault that the app swallowed is raised here."""
        self._stack.close()
        explain(error)
        self._trajectory.metrics[CAPTURED] = self._trajectory.metrics.get(CAPTURED, 0) + self._ledger.count
        self._ledger.close(self._trajectory, self._train_on)
        try:
            self._ledger.show(self._trajectory)
        except (ValueError, TypeError, KeyError) as unreadable:  # a message of an odd shape spoils no rollout
            self._trajectory.log(f"the conversations cannot be shown: {unreadable!r}")
        if self._trajectory.reward is None:
            self._trajectory.reward = logged_reward(self._trajectory)
        if self._active.faults and error is not self._active.faults[0]:
            raise self._active.faults[0] from error
