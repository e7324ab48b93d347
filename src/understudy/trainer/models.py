"""The models of a run: one as a rule, or several that play different parts in the same rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeGuard, cast

from openai.types.chat.chat_completion import Choice

from understudy.client.capture import recorded_calls
from understudy.client.http import Api
from understudy.client.model import TrainableModel
from understudy.client.records import rollout_records
from understudy.config import TrainConfig
from understudy.errors import ConfigError, RolloutError, ServerError, UnderstudyError
from understudy.types import RolloutPlace, Trajectory, TrajectoryGroup, call_ref
from understudy.wire import LogRequest

Models = tuple[TrainableModel, ...]


class StepOutcome(StrEnum):
    TRAINED = "trained"
    NO_SIGNAL = "no_signal"  # nothing to learn from: `no_signal` is the kind, `why` the words
    NO_CALLS = "no_calls"  # none of its calls was in a rollout that counts
    DONE = "done"  # it had made its steps before, and was not asked


@dataclass(frozen=True)
class ModelStep:
    """What one iteration did for one model. `step` is the model's step afterwards, `why` the reason of NO_CALLS and
    NO_SIGNAL, `no_signal` the kind of the latter as TrainResult has it."""

    step: int
    outcome: StepOutcome
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    warnings: tuple[str, ...] = ()
    why: str = ""
    no_signal: str | None = None
    checkpoint: str | None = None  # of TRAINED: its folder on the server's machine


def checked_models(given: object) -> Models:
    """One model, or a sequence of them, as a tuple; raises ConfigError."""
    if _is_model(given):
        return (given,)
    found = cast(Sequence[object], given) if isinstance(given, Sequence) and not isinstance(given, str | bytes) else ()
    models = tuple(each for each in found if _is_model(each))
    if not models or len(models) != len(found):
        raise ConfigError(f"model: a TrainableModel, or a sequence of them, is needed, got {given!r:.200}")
    names = [model.name for model in models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"model: each needs a name of its own; {', '.join(twice)} comes twice")
    return models


def _is_model(value: object) -> TypeGuard[TrainableModel]:
    return isinstance(value, TrainableModel)


async def steps_of(models: Models) -> dict[str, int]:
    """The newest step of each model, by name."""
    return {model.name: await model.get_step() for model in models}


async def train_each(
    models: Models, groups: Sequence[TrajectoryGroup], steps: Mapping[str, int], configs: Mapping[str, TrainConfig]
) -> dict[str, ModelStep]:
    """One train request for each model that has a config, the others are done -> what was done, by name.

    Models of one server are trained one after the other, servers side by side; all have ended before an error of one is
    raised. One of several that was not called is no error, unless none was: RolloutError."""
    servers = await _by_server(models)

    async def on_one_server(own: Sequence[TrainableModel]) -> dict[str, ModelStep]:
        known = groups if len(servers) == 1 else await _known_to(await own[0].api(), groups)
        made: dict[str, ModelStep] = {}
        if all(configs.get(model.name) is None for model in own):  # no train request tells this server of the rollouts
            await _finish(own[0], known)
        for model in own:
            step, config = steps[model.name], configs.get(model.name)
            if config is None:
                made[model.name] = ModelStep(step, StepOutcome.DONE)
            elif len(servers) > 1 and (why := await _why_not_called(model, known)):
                made[model.name] = ModelStep(step, StepOutcome.NO_CALLS, why=why)
            else:
                made[model.name] = await _train(model, known, step, config, several=len(models) > 1)
        return made

    answers = await asyncio.gather(*(on_one_server(own) for own in servers.values()), return_exceptions=True)
    made: dict[str, ModelStep] = {}
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        made |= answer
    if all(step.outcome == StepOutcome.NO_CALLS for step in made.values()):
        raise RolloutError("\n".join(f"{name} was not called: {step.why}" for name, step in made.items()))
    return {model.name: made[model.name] for model in models}


async def _by_server(models: Models) -> dict[str, list[TrainableModel]]:
    servers: dict[str, list[TrainableModel]] = {}
    for model in models:
        servers.setdefault((await model.api()).url, []).append(model)
    return servers


async def _known_to(api: Api, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The groups as one of several servers may be told of them: without weights, rewards and marks of calls that another
    one recorded."""

    async def known(trajectory: Trajectory) -> Trajectory:
        if not (trajectory.weights or trajectory.call_rewards or trajectory.unused):
            return trajectory
        own = {call.id for call in await recorded_calls(api, trajectory.id)}
        weights = {call_id: weight for call_id, weight in trajectory.weights.items() if call_id in own}
        rewards = {call_id: reward for call_id, reward in trajectory.call_rewards.items() if call_id in own}
        unused = [call_id for call_id in trajectory.unused if call_id in own]
        return trajectory.model_copy(update={"weights": weights, "call_rewards": rewards, "unused": unused})

    return [
        group.model_copy(update={"trajectories": await asyncio.gather(*map(known, group.trajectories))})
        for group in groups
    ]


async def _train(
    model: TrainableModel, groups: Sequence[TrajectoryGroup], step: int, config: TrainConfig, several: bool
) -> ModelStep:
    began = time.monotonic()
    try:
        result = await model.train(groups, config=config, pbar_desc=None)
    except ServerError as error:
        if not several or error.code != "no_calls":
            raise
        return ModelStep(step, StepOutcome.NO_CALLS, time.monotonic() - began, why=str(error))
    outcome = StepOutcome.TRAINED if result.applied else StepOutcome.NO_SIGNAL
    return ModelStep(
        result.step,
        outcome,
        time.monotonic() - began,
        result.metrics,
        result.warnings,
        why=result.why,
        no_signal=result.no_signal,
        checkpoint=result.checkpoint,
    )


async def _why_not_called(model: TrainableModel, groups: Sequence[TrajectoryGroup]) -> str | None:
    """Why a model on a server of its own has nothing to learn from: that server recorded no call in any rollout."""
    recorded = await _finish(model, groups)
    return None if any(recorded.values()) else f"{(await model.api()).url} recorded no call in any rollout"


async def _finish(model: TrainableModel, groups: Sequence[TrajectoryGroup]) -> dict[str, int]:
    return await (await model.api()).finish(rollout_records(groups, model.name, RolloutPlace()))


async def keep(models: Models, groups: Sequence[TrajectoryGroup]) -> None:
    """Finish the rollouts, with their rewards, on each server: they stay there even if they are never trained."""
    servers = await _by_server(models)
    for model, *_ in servers.values():
        await _finish(model, groups if len(servers) == 1 else await _known_to(await model.api(), groups))


async def keep_beside(error: UnderstudyError, models: Models, groups: Sequence[TrajectoryGroup]) -> None:
    """`keep` the rollouts that an error leaves untrained; it gets a note of a server that does not take them."""
    try:
        await keep(models, groups)
    except UnderstudyError as also:
        error.add_note(f"The rollouts could not be kept on the server: {type(also).__name__}: {also}")


async def check_choices(models: Models, groups: Sequence[TrajectoryGroup]) -> None:
    """Raise ConfigError for rollouts of which several models cannot tell which calls are whose."""
    if len(models) == 1:
        return
    kept = [each for group in groups for each in group if not each.captured]
    foreign = next((each for each in kept if any(call_ref(choice) is None for choice in _choices(each))), None)
    if foreign is not None:
        raise ConfigError(
            f"trajectory {foreign.id} keeps a choice of another endpoint, and which of {_names(models)} should learn it "
            "is not known: keep it as a plain message"
        )
    if kept and len(await _by_server(models)) > 1:
        raise ConfigError(
            f"trajectory {kept[0].id} names its calls by their choices, which only the server that answered knows, and "
            f"{_names(models)} run on several: run the agent in us.capture_auto_trajectory(...), or give all models "
            "one backend"
        )


async def log_to_each(
    models: Models,
    groups: Sequence[TrajectoryGroup],
    metrics: Mapping[str, float],
    split: str,
    steps: Mapping[str, int],
) -> None:
    """Keep evaluated rollouts with every model, each at its own step. The first comes last: a rollout's record names the
    model that it was finished for last, and lists have it under all."""
    several = len(await _by_server(models)) > 1
    for model in reversed(models):
        known = await _known_to(await model.api(), groups) if several else groups
        await model.log(known, metrics=metrics, split=split, step=steps[model.name])


async def log_spent(
    model: TrainableModel, groups: Sequence[TrajectoryGroup], step: int, spent: Mapping[str, float]
) -> None:
    """Keep with the model what other LLMs were asked for a step and what that cost; the dashboard shows it."""
    if not spent:
        return
    first = next((trajectory.id for group in groups for trajectory in group), None)
    ids = (first,) if first is not None else ()  # names the run
    await (await model.api()).log(
        model.name, LogRequest(split="train", step=step, metrics=dict(spent), trajectory_ids=ids)
    )


def _choices(trajectory: Trajectory) -> Iterator[Choice]:
    for history in (trajectory, *trajectory.additional_histories):
        yield from (item for item in history.entries() if isinstance(item, Choice))


def _names(models: Models) -> str:
    return ", ".join(model.name for model in models)
