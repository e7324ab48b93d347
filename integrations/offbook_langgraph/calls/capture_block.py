"""`capture`: a context manager that redirects and records the chat model calls of a block under one trajectory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TypeAlias, cast

from offbook import TrainableModel, Trajectory
from offbook.base.errors import ConfigError
from offbook.client.endpoint_model import EndpointModel
from offbook.client.rollouts.capture import capturing, logged_reward
from offbook.client.rollouts.sampling import MAX_COMPLETION_TOKENS, completion_limit
from offbook_langgraph.chat_model import Answering, chat_model, in_own_loop

from .active_capture import (
    ActiveCapture,
    CallRoute,
    OnLeak,
    Scope,
    SharedState,
    activated,
    active,
)
from .error_notes import add_tool_note
from .judge_warnings import warn_unlike
from .langchain_patches import install
from .origins import OriginCounts
from .recorded_calls import RecordedCalls, TrainOn
from .selection import Predicate, Selection, as_predicate

Models: TypeAlias = TrainableModel | Mapping[TrainableModel, Selection]
"""The trained model; or several, each with a selection of calls: one LoRA per role."""

Answerers: TypeAlias = Answering | Mapping[Answering, Selection]
"""The models that answer in a comparison in place of the trained ones, with the same selections."""

CAPTURED = "captured_calls"
"""Name of a trajectory's metric: the number of calls that the trained models answered."""
# Allowed values of the options with a closed set.
OPTIONS = {"scope": ("context", "process"), "on_leak": ("error", "warn", "ignore"), "shared_state": ("error", "allow")}


def by_model(models: Models, select: Selection | None) -> dict[TrainableModel, Predicate | None]:
    """Each trained model with the predicate that selects its calls. Raises ConfigError."""
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
    for key in models:
        if not isinstance(key, TrainableModel):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"model: the keys must be TrainableModels, got {key!r}")
    return {key: as_predicate(taken, f"model[{key.name!r}]") for key, taken in models.items()}


def by_answerer(models: Models | Answerers, select: Selection | None) -> Mapping[Answering, Predicate | None]:
    """Like `by_model`, also for the other LLMs of a comparison."""
    if isinstance(models, EndpointModel):
        return {models: as_predicate(select, "select")}
    if isinstance(models, Mapping) and models and all(isinstance(key, EndpointModel) for key in models):
        return {key: as_predicate(taken, f"model[{key.name!r}]") for key, taken in models.items()}
    return {**by_model(cast(Models, models), select)}


def check_choice(option: str, value: str) -> None:
    """Raise ConfigError unless `value` is one of the option's values."""
    if value not in OPTIONS[option]:
        raise ConfigError(f"{option}: one of {', '.join(OPTIONS[option])} is needed, got {value!r}")


def check_length(max_completion_tokens: int | None) -> None:
    """Raise ConfigError unless the limit is None or a whole number of at least 1."""
    if max_completion_tokens is None:
        return
    if not isinstance(max_completion_tokens, int) or max_completion_tokens < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"max_completion_tokens: a whole number of at least 1 is needed, got {max_completion_tokens!r}"
        )


class capture:  # used like a function: `async with capture(model) as trajectory`
    """Send the selected chat model calls of a block to `model` and record them under one trajectory.

    `with` and `async with` return the trajectory; it has the conversations when the block ends. Use one capture per rollout.
    Captures nest: a call goes to the innermost one that selects it.

    select, exclude: which calls (see `Selection`); the others stay on the app's own model.
    scope: "process" also captures threads and event loops that ran before the block. One such capture per process.
    on_leak: what happens when a request to another LLM bypasses the capture; "error" raises LeakError.
    shared_state: whether two rollouts may use one checkpointer thread or store namespace; "error" raises SharedStateError.
    max_completion_tokens: limit per call, unless the app sets a smaller one; None: the Trainer's limit, else 1,024.
    train_on: origin -> the weight of a call in training, or False. `origin.unused` is set when the app discarded the output.

    Raises ConfigError for an invalid option or a second use, CaptureError for a call that it cannot assign.
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
        self._recorded = RecordedCalls()
        self._stack = ExitStack()
        self._used = False

    def _limit(self) -> int:
        """Most tokens of a call, unless the app sets fewer."""
        return self._longest or completion_limit() or MAX_COMPLETION_TOKENS

    async def _routes(self) -> tuple[CallRoute, ...]:
        longest = self._limit()
        targets = await asyncio.gather(
            *(chat_model(model, self._temperature, longest=longest) for model in self._models)
        )
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
            runs=self._recorded,
            faults=self._recorded.faults,
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
        """Write metrics, weights and conversations on the trajectory. Raises a capture error that the app swallowed."""
        self._stack.close()
        add_tool_note(error)
        warn_unlike(self._active.calls)
        bases = {model.base_model for model in self._models if isinstance(model, TrainableModel)}
        self._recorded.add_length_note(error, self._limit(), sorted(bases))
        self._trajectory.metrics[CAPTURED] = self._trajectory.metrics.get(CAPTURED, 0) + self._recorded.count
        self._recorded.close(self._trajectory, self._train_on)
        try:
            self._recorded.show(self._trajectory)
        except (ValueError, TypeError, KeyError) as unreadable:  # an unusual message must not fail the rollout
            self._trajectory.log(f"the conversations cannot be shown: {unreadable!r}")
        if self._trajectory.reward is None:
            self._trajectory.reward = logged_reward(self._trajectory)
        if self._active.faults and error is not self._active.faults[0]:
            raise self._active.faults[0] from error
