"""Rollouts of agents that other libraries run: their client, their recorded calls, and a step of training on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version

from openai import AsyncOpenAI

from offbook import TrainableModel, Trajectory, TrajectoryGroup, capture_auto_trajectory, gather_trajectory_groups
from offbook.base.types import Call, CallStatus
from offbook.testing import ScriptedServer
from tests.client.results import Result, check, mode_of

QUESTION = "what is the size of box 4821?"
QUESTIONS = [f"what is the size of box 482{number}?" for number in range(8)]
"""One for each rollout of a group: rollouts that sampled the same would cancel out."""


def client_for(server: ScriptedServer, trajectory_id: str) -> AsyncOpenAI:
    """A client of the SDK's own, at the URL that names the trajectory."""
    return AsyncOpenAI(base_url=f"{server.url}/t/{trajectory_id}/v1", api_key="unused", max_retries=0)


def recorded(server: ScriptedServer, trajectory_id: str, count: int) -> tuple[Call, ...]:
    """The calls under the trajectory: exactly `count`, which are all that the model received, with ids and logprobs."""
    calls = server.calls(trajectory_id)
    assert len(calls) == len(server.sampler.received) == count
    for call, request in zip(calls, server.sampler.received, strict=True):
        assert (list(call.messages), call.status) == (request["messages"], CallStatus.COMPLETE)
        assert all(len(output.logprobs) == len(output.token_ids) > 0 for output in call.outputs)
    return calls


def one_branch(calls: tuple[Call, ...]) -> bool:
    """Whether each prompt extends the one before and what was sampled there, token by token."""
    known = [call.prompt_ids + call.outputs[0].token_ids for call in calls]
    return all(later.prompt_ids[: len(ids)] == ids for ids, later in zip(known, calls[1:], strict=False))


def shown(server: ScriptedServer, package: str, api: str, calls: tuple[Call, ...]) -> None:
    """Compare what an agent of an installed package did with its row in the table of clients."""
    received = server.sampler.received
    row = Result("Python", package, version(package), api, len(received), len(calls), True, (mode_of(received),))
    assert one_branch(calls)
    check(row)


async def trained(model: TrainableModel, run: Callable[[str], Awaitable[int]]) -> list[Trajectory]:
    """Train a step on eight captured runs of an agent, one on each of QUESTIONS, which return how many calls they made."""
    await model.register()
    made: dict[str, int] = {}

    async def rollout(number: int) -> Trajectory:
        counts: list[int] = []

        async def counted() -> None:
            counts.append(await run(QUESTIONS[number]))

        trajectory = await capture_auto_trajectory(counted())
        trajectory.reward = float(number)
        made[trajectory.id] = counts[0]
        return trajectory

    [group] = await gather_trajectory_groups([TrajectoryGroup(rollout(number) for number in range(8))])
    result = await model.train([group])
    assert result.applied and not result.warnings
    assert result.metrics["calls/rendered_share"] == 0
    assert result.metrics["calls/trained"] == result.metrics["calls/total"] == sum(made.values())
    api = await model.api()
    assert made == {name: len((await api.trajectory(name)).calls) for name in made}
    assert [trajectory.messages()[0].get("content") for trajectory in group] == QUESTIONS
    return group.trajectories
