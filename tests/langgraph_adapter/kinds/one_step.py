"""One step of training on the real engine, for apps that other people wrote: their calls, and that they were trained."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

from offbook import TrainableModel, TrainConfig, current_trajectory
from offbook.base.types import Call
from offbook_langgraph import trainable

ROLLOUTS = 8


def calls_of_a_trained_step(app: Any, model: TrainableModel, scenario: Any) -> list[tuple[Call, ...]]:
    """Train one step on rollouts of one scenario, with rewards that differ, and return the calls of each rollout."""
    rollouts: list[str] = []

    def reward(scenario: Any, output: Any) -> float:
        trajectory = current_trajectory()
        assert trajectory is not None
        rollouts.append(trajectory.id)
        return zlib.crc32(trajectory.id.encode()) % 97 / 97

    agent = trainable(app, model=model, reward=reward, temperature=1.5)  # rollouts that sample the same train nothing
    report = agent.train([scenario], steps=1, group_size=ROLLOUTS, scenarios_per_step=1, config=TrainConfig())
    assert (report.step, len(rollouts), report.iterations[-1].failed) == (1, ROLLOUTS, 0)
    calls = asyncio.run(_recorded(model, rollouts))
    metrics = report.iterations[-1].metrics
    assert metrics["calls/trained"] == metrics["calls/total"] == sum(map(len, calls))
    assert metrics["calls/rendered_share"] == 0
    return calls


async def _recorded(model: TrainableModel, rollouts: list[str]) -> list[tuple[Call, ...]]:
    api = await model.api()
    return [(await api.trajectory(name)).calls for name in rollouts]
