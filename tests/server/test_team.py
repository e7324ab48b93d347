"""A server whose steps are computed by a team of learners: a killed learner costs one step, and none survives the server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.server.servers import RunningServer, events, train_body, until

GONE_SECONDS = 30.0
"""Generous: the kernel ends them at once, on a machine that tests share."""


def others_of(server: RunningServer) -> list[psutil.Process]:
    """The learners besides the first, which runs in a group that it shares with them."""
    return until(lambda: server.child("engine.learner").children(), "a second learner")


@pytest.mark.slow("kills of real servers")
def test_a_killed_learner_of_a_team_fails_its_step_and_all_end_with_the_server(tmp_path: Path) -> None:
    with RunningServer(tmp_path / "dir", "--learners", "2") as server:
        assert server.train("first-step", [server.rollouts(2, "first")])[-1]["result"]["step"] == 1
        [idle] = others_of(server)
        first = server.child("engine.learner")
        idle.kill()  # between steps: the team is started again, and no step fails
        until(lambda: not first.is_running(), "the first learner ends with the other")
        assert server.train("second-step", [server.rollouts(2, "second")])[-1]["result"]["step"] == 2

        [busy] = others_of(server)
        ids = server.rollouts(2, "third")
        busy.suspend()
        with ThreadPoolExecutor() as threads:
            request = threads.submit(lambda: list(events(server.http, train_body("third-step", [ids]))))
            job = (
                server.folder / "jobs" / "third-step" / "job.json"
            )  # before it, a dead team is started again, and takes the step
            until(job.exists, "the step runs")
            busy.kill()
            last = request.result(60)[-1]
        assert last["kind"] == "error" and last["error"]["code"] == "learner_died"
        assert "learner 2 of 2 ended (signal 9 (SIGKILL))" in last["error"]["message"]
        for _ in range(2):
            assert server.train("third-step", [ids])[-1]["result"]["step"] == 3

        team = [server.child("engine.learner"), *others_of(server)]
        server.kill()
        assert not psutil.wait_procs(team, GONE_SECONDS)[1]
