"""Which member of a pool answers a call: over scripted vLLMs on real sockets."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from offbook.base.wire import TRAJECTORY_HEADER
from offbook.server.sampler import pool as pools
from offbook.server.sampler import running_sampler
from offbook.server.sampler.pool import Routes, SamplerPool
from offbook.server.sampler.running_sampler import RunningSampler
from offbook.testing.asgi import serving
from tests.fakes.gateway import Gateway
from tests.fakes.scripted_sampler import ScriptedCompletion, ScriptedSampler

SCENARIOS, GROUP, TURNS, VLLMS = 24, 8, 6, 4


@dataclass
class Replica(ScriptedSampler):
    """Answers in a random order. From its death on, its connections break and it is not healthy."""

    draw: random.Random = field(default_factory=lambda: random.Random(0))

    async def _complete(self, body: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(self.draw.uniform(0, 0.002))
        if not self.healthy:
            self.completions.append(ScriptedCompletion(dies_after=0))
        await super()._complete(body, receive, send)


@asynccontextmanager
async def pool() -> AsyncIterator[tuple[list[Replica], SamplerPool]]:
    async with AsyncExitStack() as stack:
        replicas = [Replica() for _ in range(VLLMS)]
        for replica in replicas:
            replica.url = await stack.enter_async_context(serving(replica))
        members = SamplerPool([RunningSampler(replica.url) for replica in replicas])
        members.start()
        try:
            await asyncio.gather(*(member.ready() for member in members.members))
            yield replicas, members
        finally:
            await members.stop()


def of_call(trajectory: str, scenario: int = 0, turn: int = 0) -> dict[str, Any]:
    text = {"role": "user", "content": f"scenario {scenario}"}
    return {"model": "base", "messages": [text, *[text] * turn], "max_tokens": 8, "user": trajectory}


async def rollouts(members: SamplerPool, scenarios: int, kill: Replica | None = None) -> list[int]:
    """The statuses of all calls of all rollouts, which run at once. `kill` dies when 40 % are answered."""
    statuses: list[int] = []

    async def rollout(scenario: int, number: int) -> None:
        name = f"{scenario}-{number}"
        for turn in range(TURNS):
            statuses.append((await members.calls.post(of_call(name, scenario, turn), trajectory=name)).status)
            if kill is not None and len(statuses) > 0.4 * scenarios * GROUP * TURNS:
                kill.healthy = False

    await asyncio.gather(*(rollout(scenario, number) for scenario in range(scenarios) for number in range(GROUP)))
    return statuses


def served(replicas: list[Replica]) -> dict[str, list[int]]:
    """By rollout, which replica received its turns, in order of the turns."""
    found: dict[str, dict[int, int]] = {}
    for index, replica in enumerate(replicas):
        for body in replica.received:
            found.setdefault(body["user"], {})[len(body["messages"])] = index
    return {name: [turns[turn] for turn in sorted(turns)] for name, turns in found.items()}


async def test_turns_stay_on_their_replica_and_rollouts_of_a_group_share_one_while_all_share_the_calls() -> None:
    async with pool() as (replicas, members):
        assert set(await rollouts(members, SCENARIOS)) == {200}
    found = served(replicas)
    pairs = [pair for turns in found.values() for pair in pairwise(turns)]
    assert len(pairs) == SCENARIOS * GROUP * (TURNS - 1)
    assert all(before == after for before, after in pairs)
    groups = [{found[f"{scenario}-{number}"][0] for number in range(GROUP)} for scenario in range(SCENARIOS)]
    assert sum(map(len, groups)) / SCENARIOS <= 2.5
    assert max(len(replica.received) for replica in replicas) * VLLMS <= 1.6 * SCENARIOS * GROUP * TURNS


async def test_rollouts_of_a_killed_replica_move_and_lose_no_call_while_the_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running_sampler, "CONNECT_SECONDS", 600)
    async with pool() as (replicas, members):
        assert Counter(await rollouts(members, 6, kill=replicas[0])) == {200: 6 * GROUP * TURNS}
    moves = [pair for turns in served(replicas).values() for pair in pairwise(turns) if pair[0] != pair[1]]
    assert 0 < len(moves) <= 6 * GROUP and {before for before, _ in moves} == {0}


async def test_a_chat_without_a_trajectory_goes_by_its_opening() -> None:
    async with pool() as (replicas, members):
        for turn in range(3):
            for scenario in range(8):
                await members.calls.post(of_call(f"chat {scenario}", scenario, turn))
    assert {len(set(turns)) for turns in served(replicas).values()} == {1}
    assert len({turns[0] for turns in served(replicas).values()}) > 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_gateway_names_the_trajectory_of_a_call(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    calls = gateway.services.sampler.calls
    method = "stream" if stream else "post"
    named: list[str | None] = []
    send: Any = getattr(calls, method)

    def noting(*words: Any) -> Any:
        named.append(words[-1])
        return send(*words)

    monkeypatch.setattr(calls, method, noting)
    for headers in ({TRAJECTORY_HEADER: "t1"}, {}):
        assert (await gateway.chat(headers, stream=stream)).status_code == 200
    assert named == ["t1", None]


def test_more_trajectories_than_the_limit_forget_the_one_used_least_recently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MAX_TRAJECTORIES", 3)
    members: Any = [SimpleNamespace(state="ok", calls=SimpleNamespace(in_flight=0, awake=True)) for _ in range(2)]
    route = Routes(members)
    first: Any = route.member(of_call("a"), "a")
    other = members[1 - members.index(first)]
    first.calls.in_flight = 9  # what is new goes to the other one now
    assert route.member(of_call("b"), "b") is other
    for name in ("c", "a", "d", "a"):
        route.member(of_call(name), name)
    assert route.member(of_call("a"), "a") is first
    first.calls.in_flight, other.calls.in_flight = 0, 9
    assert route.member(of_call("d"), "d") is other  # remembered
    assert route.member(of_call("b"), "b") is first  # forgotten
