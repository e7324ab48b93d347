"""Processes killed at bad moments: nothing that was acknowledged is lost, and nothing is half-applied."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from offbook import tiny
from tests.server.servers import RunningServer, chat_body, events, train_body, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("faults")
    shutil.copytree(tiny.path(), folder / "base")  # restarts must find the same weights
    with RunningServer(folder / "dir", "--model", str(folder / "base")) as running:
        yield running


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def long_call(server: RunningServer, trajectory: str, tokens: int = 100) -> httpx.Response:
    return server.chat(trajectory=trajectory, max_tokens=tokens, min_tokens=tokens, seed=1)


@pytest.mark.slow("kills of real servers")
def test_calls_survive_the_death_of_the_sampler_and_are_recorded_once(server: RunningServer) -> None:
    sampler = server.child("inference")
    with ThreadPoolExecutor(16) as threads:
        calls = [threads.submit(long_call, server, f"survivor-{index}") for index in range(16)]
        until(lambda: server.http.get("/health").json()["in_flight"] >= 16, "16 calls run")
        sampler.kill()
        answers = [call.result(300) for call in calls]
    assert [answer.status_code for answer in answers] == [200] * 16
    assert server.child("inference").pid != sampler.pid
    for index in range(16):
        found = server.http.get(f"/api/trajectories/survivor-{index}").json()["calls"]
        assert [call["status"] for call in found] == ["truncated"]


def test_after_a_restart_the_sampler_has_the_newest_lora(server: RunningServer) -> None:
    ids = server.rollouts(2, "lora")
    assert server.train("lora-step", [ids])[-1]["result"]["applied"]
    before = server.chat(temperature=0.0, logprobs=True).json()["choices"][0]
    server.child("inference").kill()
    after = server.chat(temperature=0.0, logprobs=True).json()["choices"][0]
    assert after["message"] == before["message"]
    assert [each["token"] for each in after["logprobs"]["content"]] == [
        each["token"] for each in before["logprobs"]["content"]
    ]


def test_a_client_that_vanishes_mid_stream_leaves_a_cancelled_call_and_a_server_that_goes_on(
    server: RunningServer,
) -> None:
    body = chat_body(stream=True, max_tokens=200, min_tokens=200)
    headers = {"x-offbook-trajectory": "vanished"}
    with (
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as leaver,
        leaver.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        next(answer.iter_lines())
    found = until(lambda: _calls(server, "vanished"), "the call is recorded")
    assert [call["status"] for call in found] == ["cancelled"]
    assert server.chat().status_code == 200


def _calls(server: RunningServer, trajectory: str) -> list[dict[str, Any]]:
    answer = server.http.get(f"/api/trajectories/{trajectory}")
    return answer.json()["calls"] if answer.status_code == 200 else []


def test_the_death_of_the_learner_in_a_step_is_an_error_and_the_request_sent_again_is_applied_once(
    server: RunningServer,
) -> None:
    # The learner is loaded by a first step: one that dies before that is only replaced.
    server.train("wedding-step", [server.rollouts(2, "bride")])
    ids = server.rollouts(2, "widow")
    step = server.http.get("/api/models/default").json()["step"]
    learner = server.child("engine.learner")
    step_events = events(server.http, train_body("widow-step", [ids], epochs=64))
    next(event for event in step_events if event["kind"] == "progress")  # the learner has the step and 64 epochs of it
    learner.kill()
    *_, last = step_events
    assert last["kind"] == "error" and last["error"]["code"] == "learner_died"
    assert "SIGKILL" in last["error"]["message"] and "jobs/widow-step" in last["error"]["message"]
    assert server.http.get("/api/models/default").json()["step"] == step
    assert server.train("widow-step", [ids], epochs=64)[-1]["result"]["step"] == step + 1
    assert server.train("widow-step", [ids], epochs=64)[-1]["result"]["step"] == step + 1
    assert server.http.get("/api/models/default").json()["step"] == step + 1
    assert not (server.folder / "jobs" / "widow-step").exists()


@pytest.mark.slow("kills of real servers")
def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "dir"
    with RunningServer(folder) as first:
        ids = first.rollouts(2, "kept")
        assert first.train("applied-step", [ids])[-1]["result"]["step"] == 1
        more = first.rollouts(2, "more")
        children = [first.child("inference"), first.child("engine.learner")]
        children[1].suspend()
        with ThreadPoolExecutor() as threads:
            request = threads.submit(lambda: list(events(first.http, train_body("cut-step", [more]))))
            until(lambda: first.http.get("/api/train/cut-step").json().get("state") == "running", "the step runs")
            first.kill()
            assert isinstance(request.exception(30), httpx.HTTPError)
        until(lambda: all(ended(child) for child in children), "the children have ended with the server", 20)
    _forget_outcome(folder, "applied-step")
    with RunningServer(folder) as second:
        assert second.http.get("/api/models/default").json()["step"] == 1
        for trajectory in (*ids, *more):
            assert len(_calls(second, trajectory)) == 1
        assert second.http.get("/api/train/cut-step").json()["state"] == "interrupted"
        assert "cut-step" in second.output() and "interrupted" in second.output()
        assert second.http.get("/api/train/applied-step").json()["state"] == "done"
        assert second.chat().status_code == 200
        assert second.train("applied-step", [ids])[-1]["result"]["step"] == 1
        assert second.train("cut-step", [more])[-1]["result"]["step"] == 2
        assert second.train("cut-step", [more])[-1]["result"]["step"] == 2
        second.interrupt()
        assert second.process.wait(60) == 0


def _forget_outcome(folder: Path, request_id: str) -> None:
    """As if the server had died between the checkpoint's rename and the write of the outcome."""
    with sqlite3.connect(folder / "records.db") as records:
        (text,) = records.execute("SELECT status FROM trains WHERE id = ?", (request_id,)).fetchone()
        status = json.dumps(json.loads(text) | {"state": "running", "result": None})
        records.execute("UPDATE trains SET state = 'running', status = ? WHERE id = ?", (status, request_id))
    records.close()
