"""Rollouts as they are written for OpenPipe ART: only the import says something else."""

from __future__ import annotations

import math
import random
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from typing import Any

import openai
import pytest

import offbook
import offbook_art as art

BOARD = 3


@dataclass(frozen=True)
class Scenario2048:
    step: int
    seed: int


class Game:
    """2048 on a small board: moves slide and merge, then a 2 appears."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows = [[0] * BOARD for _ in range(BOARD)]
        self.drop()

    def drop(self) -> None:
        free = [(r, c) for r in range(BOARD) for c in range(BOARD) if self.rows[r][c] == 0]
        if free:
            r, c = self.random.choice(free)
            self.rows[r][c] = 2

    def slide(self, row: list[int]) -> list[int]:
        kept = [value for value in row if value]
        merged: list[int] = []
        while kept:
            value = kept.pop(0)
            if kept and kept[0] == value:
                value += kept.pop(0)
            merged.append(value)
        return merged + [0] * (BOARD - len(merged))

    def move(self, direction: str) -> None:
        flip = direction in ("right", "down")
        lines = [list(line) for line in (zip(*self.rows, strict=True) if direction in ("up", "down") else self.rows)]
        lines = [self.slide(line[::-1])[::-1] if flip else self.slide(line) for line in lines]
        self.rows = [list(line) for line in zip(*lines, strict=True)] if direction in ("up", "down") else lines
        self.drop()

    def best(self) -> int:
        return max(max(row) for row in self.rows)

    def text(self) -> str:
        return "\n".join("|".join(f"{value or '_':>3}" for value in row) for row in self.rows)


def parsed_move(text: str) -> str:
    move = ElementTree.fromstring(text).text
    if move not in ("up", "down", "left", "right"):
        raise ValueError(f"no such move: {move}")
    return move


@art.retry(exceptions=(openai.APITimeoutError,))  # type: ignore[operator]  # a name of ART has no static type
async def rollout_2048(model: art.Model, scenario: Scenario2048) -> art.Trajectory:
    client = openai.AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    game = Game(scenario.seed)
    trajectory = art.Trajectory(
        messages_and_choices=[
            {"role": "system", "content": "You play 2048. Answer with one move as XML: <move>left</move>"}
        ],
        metadata={"step": scenario.step, "seed": scenario.seed},
        reward=0,
    )
    moves = 0
    while moves < 3:
        trajectory.messages_and_choices.append({"role": "user", "content": game.text()})
        chat_completion = await client.chat.completions.create(
            max_completion_tokens=8, messages=trajectory.messages(), model=model.get_inference_name()
        )
        choice = chat_completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        assert isinstance(choice.message.content, str)
        try:
            game.move(parsed_move(choice.message.content))
            moves += 1
        except (ElementTree.ParseError, ValueError):
            trajectory.reward = -1 - scenario.seed / 10
            trajectory.metrics["invalid"] = True
            break
    else:
        trajectory.reward = math.log(game.best(), 2)
    trajectory.metrics["max_value"] = game.best()
    trajectory.metrics["moves"] = moves
    await client.close()
    return trajectory.finish()


async def rollout_tic_tac_toe(model: art.Model, game: int) -> art.Trajectory:
    rng = random.Random(game)
    cells = [" "] * 9
    trajectory = art.Trajectory(
        messages_and_choices=[
            {"role": "system", "content": "You play tic-tac-toe as x. Answer with a number, 1 to 9."}
        ],
        reward=0,
    )
    client = model.openai_client()
    for _ in range(5):
        trajectory.messages_and_choices.append({"role": "user", "content": f"Board: {'|'.join(cells)}"})
        async with trajectory.track_duration("llm_completion"):
            completion = await client.chat.completions.create(
                model=model.name, messages=trajectory.messages(), max_tokens=4, temperature=1.0
            )
        trajectory.messages_and_choices.append(completion.choices[0])
        found = re.search("[1-9]", completion.choices[0].message.content or "")
        free = [i for i, cell in enumerate(cells) if cell == " "]
        if found is None or int(found.group()) - 1 not in free:
            trajectory.log("invalid move")
            trajectory.reward = -1 + math.log(game + 2)
            return trajectory
        cells[int(found.group()) - 1] = "x"
        free.remove(int(found.group()) - 1)
        if free:
            cells[rng.choice(free)] = "o"
    trajectory.reward = 0.5
    return trajectory


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_the_2048_loop_runs_after_changing_its_import(local_backend: art.LocalBackend) -> None:
    model = art.TrainableModel(name="agent-2048", project="2048", base_model="tiny")
    backend = local_backend
    await model.register(backend)
    for i in range(await model.get_step(), 2):
        train_groups = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup(rollout_2048(model, Scenario2048(step=i, seed=seed)) for seed in range(3))
                for _ in range(1)
            ),
            pbar_desc="gather",
            max_exceptions=1,
        )
        await model.delete_checkpoints()
        await model.train(train_groups, config=art.TrainConfig(learning_rate=1e-5))
    assert await model.get_step() == 2
    assert all(trajectory.metrics["duration"] >= 0 for group in train_groups for trajectory in group)


async def test_the_tic_tac_toe_loop_runs_with_the_newer_backend_call(local_backend: art.LocalBackend) -> None:
    model = art.TrainableModel(name="agent-tic-tac-toe", project="games", base_model="tiny", config={"lr": 5e-5})
    backend = local_backend
    await backend.register(model)
    group = art.TrajectoryGroup(rollout_tic_tac_toe(model, game) for game in range(4))
    val, train = await art.gather_trajectories(rollout_tic_tac_toe(model, g) for g in range(2)), [group]
    groups = await art.gather_trajectory_groups(train, pbar_desc="train", max_exceptions=0.5, max_metrics=2)
    await model.log(val, split="val")
    result = await backend.train(model, groups, learning_rate=model.config["lr"])
    await model.log(groups, split="train", metrics=result.metrics, step=result.step)
    assert result.applied and result.metrics["calls/rendered_share"] == 0
    assert result.metrics["trajectories/trained"] == 4


def test_its_submodules_have_the_names_of_the_package() -> None:
    from offbook_art.local import LocalBackend  # type: ignore[import-not-found]
    from offbook_art.utils import iterate_dataset  # type: ignore[import-not-found]

    found: Any = art
    assert found.local.LocalBackend is LocalBackend is offbook.LocalBackend is found.LocalBackend
    assert iterate_dataset is offbook.iterate_dataset
    assert art.Tools == list[dict[str, Any]]  # a name of annotations
    model = art.TrainableModel(name="agent", base_model="tiny")
    assert model.inference_model_name == model.get_inference_name() == "agent"
