"""Two LoRAs trained in one run."""

from __future__ import annotations

import asyncio
import zlib
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from offbook import LocalBackend, TrainableModel, TrainConfig, current_trajectory
from offbook.base.errors import ConfigError
from offbook.base.types import new_id
from offbook_langgraph import trainable

SCENARIOS = [{"id": str(number), "question": f"what is the size of box {number}?"} for number in (4821, 5913)]
SMALL: dict[str, Any] = {"group_size": 4, "scenarios_per_step": 2, "config": TrainConfig(learning_rate=3e-2)}


@tool
def box_size(box: str) -> dict[str, str]:
    """The size of a box."""
    return {"size": box[::-1]}


@tool
def box_colour(box: str) -> dict[str, str]:
    """The colour of a box."""
    return {"colour": "teal" if box[0] < "5" else "red"}


def make_app(wanted: Any, name: str) -> Any:
    own: dict[str, Any] = {"model": "own", "api_key": "unused", "base_url": "http://127.0.0.1:9/v1", "max_tokens": 48}
    model = ChatOpenAI(**own, max_retries=0)
    return create_agent(model, [wanted], name=name)


def draw(state: Any) -> float:
    """A reward that differs from rollout to rollout, however sure the policy is."""
    return zlib.crc32(str(state["messages"][-1].id).encode()) % 97 / 97


def test_two_graphs_with_different_models_are_trained_as_two_loras_in_one_run(local_backend: LocalBackend) -> None:
    sizes = TrainableModel(name=new_id("sizes"), base_model="tiny", backend=local_backend)
    colours = TrainableModel(name=new_id("colours"), base_model="tiny", backend=local_backend)
    size_app, colour_app = make_app(box_size, "sizes"), make_app(box_colour, "colours")
    made: dict[str, tuple[int, int]] = {}

    @trainable(model={sizes: {"agent": "sizes"}, colours: {"agent": "colours"}})
    async def desk(scenario: dict[str, str]) -> float:
        asked = {"messages": [("user", scenario["question"])]}
        first, second = await asyncio.gather(size_app.ainvoke(asked), colour_app.ainvoke(asked))
        trajectory = current_trajectory()
        assert trajectory is not None
        made[trajectory.id] = (answers(first), answers(second))
        return draw(first) + draw(second)

    report = desk.train(SCENARIOS, steps=1, **SMALL)
    assert (report.model, report.step) == (sizes.name, 1)
    assert report.models[colours.name].step == 1
    folders = [asyncio.run(newest(model)) for model in (sizes, colours)]
    assert len(set(folders)) == 2
    weights = [(Path(folder) / "adapter_model.safetensors").read_bytes() for folder in folders]
    assert weights[0] != weights[1]
    for trajectory_id, counts in made.items():
        assert asyncio.run(calls_by_model(sizes, trajectory_id)) == {sizes.name: counts[0], colours.name: counts[1]}
    trained = desk.trained(step={sizes.name: 1, colours.name: 0})
    assert callable(trained)
    with pytest.raises(ConfigError, match="step: several models are served: give each its own"):
        desk.trained(step=1)
    with pytest.raises(ConfigError, match="step: there is no model 'x' here"):
        desk.trained(step={"x": 1})


def answers(state: Any) -> int:
    return sum(message.type == "ai" for message in state["messages"])


async def newest(model: TrainableModel) -> str:
    return (await model.checkpoints())[-1].path


async def calls_by_model(model: TrainableModel, trajectory_id: str) -> dict[str, int]:
    found = (await (await model.api()).trajectory(trajectory_id)).calls
    return {name: sum(call.model == name for call in found) for name in {call.model for call in found}}
