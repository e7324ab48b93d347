"""The requests of a run for its models: one model, or several that play different roles in the same rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeGuard, cast

from openai.types.chat.chat_completion import Choice

from offbook.base.config import TrainConfig
from offbook.base.errors import (
    ConfigError,
    OffbookError,
    RolloutError,
    ServerError,
)
from offbook.base.types import (
    RolloutPlace,
    Trajectory,
    TrajectoryGroup,
    call_ref,
)
from offbook.base.wire import LogRequest
from offbook.client.backend import train_groups
from offbook.client.model import TrainableModel
from offbook.client.rollouts.records import rollout_records
from offbook.llms.ledger import Spending, budget

Models = tuple[TrainableModel, ...]
UNDER_WAY_SECONDS = 0.2
"""Interval of the question whether an update has ended."""


class StepOutcome(StrEnum):
    """The effect of an iteration on one model."""

    TRAINED = "trained"
    NO_SIGNAL = "no_signal"  # nothing to learn from: see `ModelStep.no_signal` and `ModelStep.why`
    NO_CALLS = "no_calls"  # no scored rollout called it
    DONE = "done"  # already at the target step: no train request


@dataclass(frozen=True)
class ModelStep:
    """The result of one iteration for one model. `step`: the model's step afterwards. `why`: explanation of NO_CALLS
    and NO_SIGNAL. `no_signal`: see `TrainResult.no_signal`."""

    step: int
    outcome: StepOutcome
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    warnings: tuple[str, ...] = ()
    why: str = ""
    no_signal: str | None = None
    checkpoint: str | None = None  # of TRAINED: its folder on the server's machine


def checked_models(value: object) -> Models:
    """One model or a sequence of models, as a tuple. Raises ConfigError for other values and for equal names."""
    if _is_model(value):
        return (value,)
    items = cast(Sequence[object], value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
    models = tuple(item for item in items if _is_model(item))
    if not models or len(models) != len(items):
        raise ConfigError(f"model: a TrainableModel, or a sequence of them, is needed, got {value!r:.200}")
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"model: each needs its own name; {', '.join(twice)} appears twice")
    return models


def _is_model(value: object) -> TypeGuard[TrainableModel]:
    return isinstance(value, TrainableModel)


async def steps_of(models: Models) -> dict[str, int]:
    """The newest step of every model, by name. Raises ConfigError for models on several servers."""
    if len(urls := {(await model.api()).url for model in models}) > 1:
        raise ConfigError(
            f"model: all models of a Trainer need one server, got {', '.join(sorted(urls))}: share a backend"
        )
    return {model.name: await model.get_step() for model in models}


async def settled_steps_of(models: Models, say: Callable[[str], None]) -> dict[str, int]:
    """The same, after the updates under way, such as that of a client that was killed: its step counts in a total of
    steps."""
    for model in models:
        waiting = False
        while (state := await (await model.api()).model(model.name)).training:
            if not waiting:
                say(f"an update of {model.name} is under way, from an earlier run or another client: waiting for it")
            waiting = True
            await asyncio.sleep(UNDER_WAY_SECONDS)
        if state.damaged:
            say(
                f"warning: {model.name} continues from step {state.step}, since later checkpoints were damaged and are "
                f"set aside: {', '.join(state.damaged)}"
            )
    return await steps_of(models)


async def train_each(
    models: Models,
    groups: Sequence[TrajectoryGroup],
    steps: Mapping[str, int],
    configs: Mapping[str, TrainConfig],
    replayed: Mapping[str, Sequence[str]],
) -> dict[str, ModelStep]:
    """Send one train request per model in `configs`, in order; models without a config are DONE. Returns the results by name.
    `replayed`: by model, the good rollouts of earlier steps that are imitated again.

    A model that no rollout called is no error, but RolloutError is raised if no model was called."""
    trained: dict[str, ModelStep] = {}
    for model in models:
        config = configs.get(model.name)
        if config is None:
            trained[model.name] = ModelStep(steps[model.name], StepOutcome.DONE)
            continue
        try:
            again = replayed.get(model.name, ())
            result = await train_groups(await model.api(), model.name, groups, config, logs=False, replayed=again)
        except ServerError as error:
            if len(models) == 1 or error.code != "no_calls":
                raise
            trained[model.name] = ModelStep(steps[model.name], StepOutcome.NO_CALLS, why=str(error))
            continue
        trained[model.name] = ModelStep(
            result.step,
            StepOutcome.TRAINED if result.applied else StepOutcome.NO_SIGNAL,
            result.metrics,
            result.warnings,
            why=result.why,
            no_signal=result.no_signal,
            checkpoint=result.checkpoint,
        )
    if all(step.outcome == StepOutcome.NO_CALLS for step in trained.values()):
        raise RolloutError("\n".join(f"{name} was not called: {step.why}" for name, step in trained.items()))
    return trained


async def save_rollouts(models: Models, groups: Sequence[TrajectoryGroup]) -> None:
    """Finish the rollouts, with their rewards, so that they are stored even if they are never trained."""
    await (await models[0].api()).finish(rollout_records(groups, models[0].name, RolloutPlace()))


async def save_rollouts_after(error: OffbookError, models: Models, groups: Sequence[TrajectoryGroup]) -> None:
    """Save the rollouts that are not trained because of `error`. If that fails, `error` gets a note."""
    try:
        await save_rollouts(models, groups)
    except OffbookError as failure:
        error.add_note(f"The rollouts could not be kept on the server: {type(failure).__name__}: {failure}")


def check_choices(models: Models, groups: Sequence[TrajectoryGroup]) -> None:
    """With several models, raise ConfigError for a rollout that keeps a choice whose model is not known."""
    if len(models) == 1:
        return
    kept = [trajectory for group in groups for trajectory in group if not trajectory.captured]
    foreign = next((trajectory for trajectory in kept if None in map(call_ref, _choices(trajectory))), None)
    if foreign is not None:
        raise ConfigError(
            f"trajectory {foreign.id} keeps a choice of another endpoint, and which of "
            f"{', '.join(model.name for model in models)} should learn it is not known: keep it as a plain message"
        )


async def log_to_each(
    models: Models,
    groups: Sequence[TrajectoryGroup],
    metrics: Mapping[str, float],
    split: str,
    steps: Mapping[str, int],
) -> None:
    """Log evaluated rollouts with every model at its own step. The first model is last, because a rollout's record
    names the last model that it was finished for; lists show it under all models."""
    for model in reversed(models):
        await model.log(groups, metrics=metrics, split=split, step=steps[model.name])


class CostLog:
    """Logs with a model what other LLMs cost, by the rollouts that it was for."""

    def __init__(self, model: TrainableModel, spending: Spending) -> None:
        self.spending = spending
        self._model = model
        self._logged = spending.by_purpose()
        self._place = LogRequest(split="train")

    def belong_to(self, groups: Sequence[TrajectoryGroup], step: int) -> None:
        """Name the rollouts that the next costs are for, and the model's step."""
        ids = [trajectory.id for group in groups for trajectory in group][:1]  # the server reads the run from it
        self._place = LogRequest(split="train", step=step, trajectory_ids=tuple(ids))

    async def log(self) -> None:
        """Log what was paid since the last log. Call it when the rollouts are stored and before they are trained."""
        metrics, self._logged = self.spending.metrics(self._logged), self.spending.by_purpose()
        if metrics:
            await (await self._model.api()).log(self._model.name, self._place.model_copy(update={"metrics": metrics}))


@asynccontextmanager
async def logged_costs(model: TrainableModel, max_cost: float | None) -> AsyncGenerator[CostLog]:
    """A budget for other LLMs. What is not logged yet is logged at the end of the block, also when it ends with an error or
    Ctrl-C."""
    with budget(max_cost) as spending:
        costs = CostLog(model, spending)
        try:
            yield costs
            await costs.log()
        except BaseException as error:
            try:
                await costs.log()
            except OffbookError as failure:
                error.add_note(f"What other LLMs cost could not be logged: {type(failure).__name__}: {failure}")
            raise


def _choices(trajectory: Trajectory) -> Iterator[Choice]:
    for history in (trajectory, *trajectory.additional_histories):
        yield from (item for item in history.entries() if isinstance(item, Choice))
