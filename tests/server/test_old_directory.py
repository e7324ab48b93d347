"""A directory that an older version wrote (`old_directory/`) opens, lists its trajectories, and is trained on."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import understudy as us
from tests.server.servers import RunningServer

WRITTEN = Path(__file__).with_name("old_directory") / "files"


@pytest.fixture
def server(tmp_path: Path):
    shutil.copytree(WRITTEN, tmp_path / "dir")
    with RunningServer(tmp_path / "dir") as running:
        yield running


def listed(server: RunningServer, **query: Any) -> list[dict[str, Any]]:
    answer = server.http.get("/api/trajectories", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["trajectories"]


async def test_a_directory_of_schema_1_opens_lists_its_trajectories_resumes_and_trains_a_step(
    server: RunningServer,
) -> None:
    rollouts = listed(server, model="agent")
    assert len(rollouts) == 14
    assert len(listed(server, model="planner")) == 6  # those whose second call went there
    trained = [rollout for rollout in rollouts if rollout["place"]["split"] == "train"]
    assert Counter(rollout["place"]["step"] for rollout in trained) == {0: 6, 1: 6}
    assert Counter(rollout["place"]["group"] for rollout in trained).most_common(1)[0][1] == 3
    assert all(rollout["tool_runs"] == [] for rollout in rollouts)
    failed = listed(server, model="agent", failed=True)
    assert [rollout["exception"]["message"] for rollout in failed] == ["the tool broke"] * 2
    for finished in rollouts:
        if finished["exception"] is None:
            calls = server.http.get(f"/api/trajectories/{finished['id']}").json()["calls"]
            assert {call["id"] for call in calls} == {ref["call_id"] for ref in finished["calls"]}

    model = us.TrainableModel("agent", "desk", "tiny", us.RemoteBackend(server.url))
    assert await model.get_step() == 2
    assert await model.read_state() == {"mine": 1}
    assert [checkpoint.step for checkpoint in await model.checkpoints()] == [1, 2]

    async def rollout(reward: float) -> us.Trajectory:
        # Each asks something else: the same answers to one question would leave nothing to learn.
        asked = {"role": "user", "content": f"where is order {reward}?"}
        trajectory = us.Trajectory(messages_and_choices=[asked])
        answer = await model.openai_client().chat.completions.create(
            model=model.name, messages=trajectory.messages(), max_tokens=8
        )
        trajectory.messages_and_choices.append(answer.choices[0])
        trajectory.reward = reward
        return trajectory

    group = us.TrajectoryGroup(rollout(reward) for reward in (0.0, 0.3, 1.0))
    result = await model.train(await us.gather_trajectory_groups([group]), learning_rate=1e-3)
    assert (result.step, result.applied) == (3, True)
    assert (server.folder / "records.db.schema-1.bak").is_file()
