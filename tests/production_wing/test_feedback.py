"""Feedback on threads, trajectories and calls: late, twice, changed, after a restart, and for what is not recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from offbook.base.wire import TrajectoryRecord
from tests.fakes.gateway import Gateway
from tests.server.servers import record

from .conftest import Opening, Passing


async def send(route: Passing | Gateway, /, **body: Any) -> httpx.Response:
    return await route.http.post(f"{route.url}/api/feedback", json=body)


async def stored(route: Passing | Gateway, trajectory_id: str) -> TrajectoryRecord:
    return (await route.services.store.finished([trajectory_id]))[trajectory_id]


async def test_feedback_by_the_apps_own_name_of_a_thread_becomes_its_reward(passing: Opening, tmp_path: Path) -> None:
    async with passing() as route:
        await route.chat(thread="t-1")
        await route.gateway.traffic.settled()
        about = {"thread_id": "t-1", "route": "desk"}
        first = await send(route, **about, score=1, comment="thanks, ann@example.com")
        name = first.json()["trajectory_id"]
        assert first.json() == {"trajectory_id": name, "reward": 1.0, "changed": True}
        assert (await send(route, **about, score=1, comment="thanks, [email]")).json()["changed"] is False
        assert (await send(route, **about, score=0.25)).json()["reward"] == 0.25
        assert (await send(route, **about, score=5, name="stars")).json()["reward"] == 0.25
    async with passing() as route:  # the same directory, after a restart
        await route.chat(thread="t-1")  # a thread goes on after its feedback
        await route.gateway.traffic.settled()
        kept = await stored(route, name)
        assert len(kept.outside_calls) == 2
        assert (kept.reward, kept.metrics) == (0.25, {"feedback/score": 0.25, "feedback/stars": 5.0})
        assert set(kept.metadata["feedback"]) == {"score", "stars"}
        assert (await send(route, thread_id="t-1", route="desk", score=1)).json()["reward"] == 1.0
        [thread] = (await route.http.get(f"{route.url}/api/trajectories", params={"run": "route/desk"})).json()[
            "trajectories"
        ]
        assert thread["reward"] == 1.0
    assert b"ann@example.com" not in b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


async def test_scores_of_calls_give_their_mean_until_the_thread_has_its_own(passing: Opening) -> None:
    async with passing() as route:
        calls = [(await route.chat(thread="t-1")).headers["x-offbook-call"] for _ in range(2)]
        await route.gateway.traffic.settled()
        assert (await send(route, call_id=calls[0], score=1)).json()["reward"] == 1.0
        assert (await send(route, call_id=calls[1], score=0)).json()["reward"] == 0.5
        assert (await send(route, call_id=calls[1], score=0)).json()["changed"] is False
        assert (await send(route, thread_id="t-1", route="desk", score=0.9)).json()["reward"] == 0.9
        assert (await send(route, call_id=calls[0][:-1] + "x", score=1)).json()["error"]["code"] == "unknown_call"


async def test_a_rollouts_own_reward_stays_and_the_score_is_a_metric(gateway: Gateway) -> None:
    answer = await gateway.chat({"x-offbook-trajectory": "r-1"})
    assert (await send(gateway, trajectory_id="r-1", score=0)).json()["error"]["code"] == "unfinished_trajectory"
    done = await gateway.http.post("/api/trajectories", json={"trajectories": [record("r-1", 0.7)]})
    assert done.status_code == 200
    assert (await send(gateway, call_id=answer.headers["x-offbook-call"], score=0)).json()["reward"] == 0.7
    kept = await stored(gateway, "r-1")
    assert (kept.reward, kept.metrics) == (0.7, {"feedback/score": 0.0})
    assert len(await gateway.calls("r-1")) == 1


async def test_a_rollout_that_is_finished_again_keeps_its_feedback(gateway: Gateway) -> None:
    for name in ("scored", "unscored"):
        await gateway.chat({"x-offbook-trajectory": name})
    await gateway.http.post(
        "/api/trajectories", json={"trajectories": [record("scored", 0.7), record("unscored", None)]}
    )
    for name in ("scored", "unscored"):
        await send(gateway, trajectory_id=name, score=0.25, comment="late")
        await send(gateway, trajectory_id=name, score=5, name="stars")
    again = [record("scored", 0.9, metrics={"turns": 2}, metadata={"app": "desk"}), record("unscored", None)]
    assert (await gateway.http.post("/api/trajectories", json={"trajectories": again})).status_code == 200
    scored, unscored = await stored(gateway, "scored"), await stored(gateway, "unscored")
    assert (scored.reward, scored.metrics) == (0.9, {"turns": 2.0, "feedback/score": 0.25, "feedback/stars": 5.0})
    assert (scored.metadata["app"], scored.metadata["feedback"]["score"]["comment"]) == ("desk", "late")
    assert (unscored.reward, unscored.metrics) == (0.25, {"feedback/score": 0.25, "feedback/stars": 5.0})
    assert (await send(gateway, trajectory_id="unscored", score=1)).json()["reward"] == 1.0


async def test_feedback_leaves_an_apps_own_metadata_of_that_name(gateway: Gateway) -> None:
    await gateway.chat({"x-offbook-trajectory": "r-1"})
    await gateway.http.post(
        "/api/trajectories", json={"trajectories": [record("r-1", None, metadata={"feedback": "mine"})]}
    )
    answer = await send(gateway, trajectory_id="r-1", score=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "metadata_taken")
    assert (await stored(gateway, "r-1")).metadata == {"feedback": "mine"}


async def test_feedback_that_follows_its_answer_at_once_finds_the_call_that_waits_to_be_recorded(
    passing: Opening,
) -> None:
    async with passing() as route:
        await route.chat(thread="t-1")
        assert (await send(route, thread_id="t-1", route="desk", score=1)).json()["reward"] == 1.0
        answered = await route.chat(thread="t-2")
        assert (await send(route, call_id=answered.headers["x-offbook-call"], score=0)).json()["reward"] == 0.0


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"thread_id": "t-9"}, 404, "unknown_thread"),
        ({"trajectory_id": "nope"}, 404, "unknown_trajectory"),
        ({"call_id": "nope"}, 404, "unknown_call"),
        ({"call_id": "a.b"}, 404, "unknown_call"),
        ({}, 400, "invalid_value"),
        ({"thread_id": "t", "call_id": "c"}, 400, "invalid_value"),
        ({"thread_id": "t", "score": "good"}, 400, "invalid_value"),
    ],
)
async def test_feedback_on_nothing_is_a_named_error(
    gateway: Gateway, body: dict[str, Any], status: int, code: str
) -> None:
    answer = await send(gateway, **({"score": 1} | body))
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_feedback_on_a_thread_that_was_deleted_is_a_named_error(passing: Opening) -> None:
    async with passing(record_mb=1e-6) as route:
        await route.chat(thread="t-1")
        await route.gateway.traffic.settled()
        await route.gateway.traffic.retain()
        answer = await send(route, thread_id="t-1", route="desk", score=1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_thread")
