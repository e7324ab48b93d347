"""Games of two players as they are written for OpenPipe ART: only the import says something else."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Awaitable

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

import offbook_art as art
from offbook_art.guided_completion import get_guided_completion_params  # type: ignore[import-not-found]
from tests.fakes.scripted_api import Asked, Reply, scripted_api

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]

# ---- tic-tac-toe against itself, some moves guided by a teacher


class ModelConfig(BaseModel):
    requires_reasoning: bool = False


class PlayerState(BaseModel):
    trajectory: art.Trajectory
    last_completion: ChatCompletion | None = None
    invalid_move: bool = False


class SelfPlayScenario(BaseModel):
    step: int
    split: str
    number: int = 0
    x_teacher: art.Model[ModelConfig] | None = None
    o_teacher: art.Model | None = None


def winner_of(cells: list[str]) -> str | None:
    for a, b, c in LINES:
        if cells[a] != " " and cells[a] == cells[b] == cells[c]:
            return cells[a]
    return "draw" if " " not in cells else None


def square_of(xml: str) -> int:
    try:
        name = ElementTree.fromstring(xml).text or ""
    except ElementTree.ParseError as error:
        raise ValueError(f"no move: {xml}") from error
    return "ABC".index(name[:1]) * 3 + "123".index(name[1:2])


async def move(
    cells: list[str], player: PlayerState, model: art.Model[ModelConfig], teacher: art.Model[ModelConfig] | None
) -> int:
    assert isinstance(model.config, ModelConfig)
    player.trajectory.messages_and_choices.append({"role": "user", "content": "|".join(cells)})
    messages = player.trajectory.messages()
    guided_choice = None
    if teacher:
        taught = await teacher.openai_client().chat.completions.create(
            model=teacher.get_inference_name(), messages=messages, max_completion_tokens=100, temperature=1.0
        )
        guided_choice, _, _ = get_guided_completion_params(taught)
    completion = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(),
        messages=messages,
        max_completion_tokens=2000 if model.config.requires_reasoning else 40,
        reasoning_effort="low" if model.config.requires_reasoning else None,
        temperature=1.0,
        extra_body={"guided_choice": guided_choice} if guided_choice and model.trainable else None,
    )
    player.last_completion = completion
    player.trajectory.messages_and_choices.append(completion.choices[0])
    content = completion.choices[0].message.content
    if content is None:
        raise ValueError("no move")
    return square_of(content)


@art.retry(exceptions=(openai.LengthFinishReasonError,))
async def rollout_self_play(
    x_model: art.Model[ModelConfig], o_model: art.Model[ModelConfig], scenario: SelfPlayScenario
) -> tuple[art.Trajectory, ...]:
    cells = [" "] * 9
    players = {
        symbol: PlayerState(
            trajectory=art.Trajectory(
                messages_and_choices=[{"role": "system", "content": f"You play tic-tac-toe as {symbol}."}],
                reward=0,
                metadata={"model_name": model.name},
            )
        )
        for symbol, model in (("x", x_model), ("o", o_model))
    }
    moves = 0
    for symbol in itertools.cycle("xo"):
        model, teacher = (x_model, scenario.x_teacher) if symbol == "x" else (o_model, scenario.o_teacher)
        try:
            square = await move(cells, players[symbol], model, teacher if moves < 2 * scenario.number else None)
            if cells[square] != " ":
                raise ValueError("taken")
        except ValueError:
            players[symbol].invalid_move = True
            players[symbol].trajectory.reward = -2 + math.log(moves + 1) / math.log(10)
            break
        cells[square] = symbol
        moves += 1
        if winner_of(cells) is not None:
            break
    for symbol, player in players.items():
        if winner_of(cells) in ("x", "o"):
            player.trajectory.reward = 1 - moves / 40 if winner_of(cells) == symbol else moves / 40
        player.trajectory.metrics["num_moves"] = moves
        player.trajectory.metrics["invalid_move"] = 1 if player.invalid_move else 0
    return players["x"].trajectory, players["o"].trajectory


def teaches(request: Asked) -> Reply:
    """Names the first free square."""
    board = request.body["messages"][-1]["content"].split("|")
    square = board.index(" ")
    message = {"role": "assistant", "content": f"<move>{'ABC'[square // 3]}{'123'[square % 3]}</move>"}
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    return Reply(json={"id": "x", "object": "chat.completion", "created": 0, "model": "teacher", "choices": [choice]})


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_self_play_with_a_teacher_runs_and_trains_though_an_opponent_never_moved(
    local_backend: art.LocalBackend,
) -> None:
    model = art.TrainableModel[ModelConfig](
        name="agent-self-play", project="games", base_model="tiny", config=ModelConfig()
    )
    await model.register(local_backend)
    with scripted_api(teaches) as api:
        teacher = art.Model[ModelConfig](
            name="teacher", project="games", inference_base_url=f"{api.url}/v1", inference_api_key="k"
        )
        scenarios = [
            SelfPlayScenario(step=0, split="train", number=number, x_teacher=teacher, o_teacher=teacher)
            for number in (0, 1, 2, 4)
        ]
        games = await art.gather_trajectories(
            (rollout_self_play(model, model, scenario) for scenario in scenarios), pbar_desc="train"
        )
    assert '"x_teacher":"teacher"' in scenarios[0].model_dump_json()
    first_x, first_o = games[0]
    assert len(games) == 4 and first_x.metrics["num_moves"] == 0 and not first_o.call_refs()
    await model.log([trajectory for game in games for trajectory in game], split="train")
    groups = [art.TrajectoryGroup([x for x, _ in games]), art.TrajectoryGroup([o for _, o in games])]
    result = await model.train(trajectory_groups=groups, config=art.TrainConfig(learning_rate=2e-5), verbose=True)
    assert result.applied and result.metrics["calls/rendered_share"] == 0
    assert result.metrics["trajectories/without_targets"] >= 1
    assert any("nothing to train" in warning for warning in result.warnings)


async def test_a_step_in_which_nobody_made_a_call_is_an_error_that_names_one() -> None:
    silent = [art.Trajectory(messages_and_choices=[{"role": "user", "content": "?"}], reward=r) for r in (0, 1)]
    with scripted_api() as api:
        model = art.TrainableModel(name="agent", base_model="tiny", backend=art.RemoteBackend(api.url))
        with pytest.raises(art.OffbookError, match=rf"{silent[0].id} .* has no model call, and neither has any other"):
            await model.train([art.TrajectoryGroup(silent)])


# ---- prisoner's dilemma against itself and against the base

PAYOFFS = {
    ("cooperate", "cooperate"): (3, 3),
    ("cooperate", "defect"): (0, 5),
    ("defect", "cooperate"): (5, 0),
    ("defect", "defect"): (1, 1),
}
ALONE = {"cooperate": 3, "defect": 5, "none": 0}
PROMPT = "You and another player choose, round after round: cooperate or defect?"


async def rollout_dilemma(
    client: openai.AsyncOpenAI, models: tuple[str, str], number: int
) -> tuple[art.Trajectory, art.Trajectory]:
    messages: tuple[art.Messages, art.Messages] = (
        [{"role": "user", "content": PROMPT}],
        [{"role": "user", "content": PROMPT}],
    )
    trajectories = (
        art.Trajectory(messages_and_choices=[*messages[0]], reward=0),
        art.Trajectory(messages_and_choices=[*messages[1]], reward=0),
    )
    for _ in range(2):
        answers: list[Awaitable[ChatCompletion]] = [
            client.chat.completions.create(messages=messages[i], model=models[i], max_completion_tokens=6)
            for i in range(2)
        ]
        choices = [completion.choices[0] for completion in await asyncio.gather(*answers)]
        actions: list[str] = []
        for i, choice in enumerate(choices):
            messages[i].append({"role": "assistant", "content": choice.message.content})
            trajectories[i].messages_and_choices.append(choice)
            words = re.findall("cooperate|defect", (choice.message.content or "").lower())
            actions.append(words[-1] if words else "none")
        gains = PAYOFFS.get((actions[0], actions[1]), (ALONE[actions[0]], ALONE[actions[1]]))
        for i in range(2):
            trajectories[i].reward = (trajectories[i].reward or 0) + gains[i]
            text = f"The other player: {choices[1 - i].message.content}\nYour score is {trajectories[i].reward}."
            messages[i].append({"role": "user", "content": text})
            trajectories[i].messages_and_choices.append(messages[i][-1])
    for place, trajectory in enumerate(trajectories):
        trajectory.reward = (trajectory.reward or 0) + number / 10 + place / 20  # the tiny policy never plays
    return trajectories


async def play_dilemma(model: art.TrainableModel, base: str) -> art.TrainResult:
    client = model.openai_client()
    self_play, base_play = await asyncio.gather(
        art.gather_trajectories(
            (rollout_dilemma(client, (model.name, model.name), i) for i in range(2)), pbar_desc="versus-self"
        ),
        art.gather_trajectories(
            (rollout_dilemma(client, (model.name, base), i) for i in range(2)), pbar_desc="versus-base"
        ),
    )
    await model.log([t for ts in self_play for t in ts], split="versus-self")
    await model.log([ts[0] for ts in base_play], split="versus-base")
    await model.log([ts[1] for ts in base_play], split="base-model")
    return await model.train(
        trajectory_groups=[
            art.TrajectoryGroup(t for ts in self_play for t in ts),
            art.TrajectoryGroup(ts[0] for ts in base_play),
        ],
        config=art.TrainConfig(learning_rate=5e-5),
    )


async def test_prisoners_dilemma_runs_after_changing_its_import(local_backend: art.LocalBackend) -> None:
    model = art.TrainableModel(name="agent-dilemma", project="prisoners-dilemma", base_model="tiny")
    await model.register(local_backend)
    result = await play_dilemma(model, model.get_inference_name(0))
    assert result.applied and result.metrics["calls/rendered_share"] == 0
    assert result.metrics["trajectories/trained"] == 6


async def test_prisoners_dilemma_may_name_the_base_by_its_own_name(local_backend: art.LocalBackend) -> None:
    model = art.TrainableModel(name="agent-dilemma-base", project="prisoners-dilemma", base_model="tiny")
    await model.register(local_backend)
    assert (await play_dilemma(model, "tiny")).applied
