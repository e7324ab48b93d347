"""Keys are planted wherever a text becomes a record, and everything that is written or shown is searched for them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbook.base.redaction import MARK, METRIC, Redaction, protect, protect_environment, redact
from offbook.base.types import (
    CallStatus,
    CallTrace,
    Json,
    OutputTrace,
    RolloutPlace,
    Sampling,
    ToolRun,
    TrainResult,
    Trajectory,
    TrajectoryGroup,
    as_rollout_exception,
)
from offbook.base.wire import ORIGIN_HEADER, TrainRequest, TrainStatus, TrajectoryQuery
from offbook.client.connection.http import Api
from offbook.client.rollouts.failures import details, failure_kinds, failures
from offbook.client.rollouts.gather import gather_trajectory_groups
from offbook.client.rollouts.records import group_wires, rollout_records
from offbook.server.training.runner import TrainFeed
from offbook.tracing.jsonl import rollout_line
from offbook.tracing.rollout_reader import pages
from tests.fakes.gateway import Gateway

VALUE, OPAQUE = "planted-value-of-a-variable", "planted.opaque.word"
FORMS = (
    "sk-proj-planted0123456789abcdef",
    "sk-ant-api03-planted0123456789",
    "ghp_planted0123456789abcdefghij",
    "github_pat_planted0123456789",
    "glpat-planted0123456789",
    "xoxb-planted-0123456789",
    "AKIAPLANTED012345678",
    "AIzaPlanted0123456789012345678901234",
    "hf_planted0123456789abcdef",
    "eyJwbGFudGVk.eyJwbGFudGVk.planted",
    "postgres://me:planted-word@db/shop",
    "Bearer planted0123456789",
    "Basic cGxhbnRlZDowMTIzNA==",
)
TEXT = " ; ".join((VALUE, *FORMS))
PLANTED = ("planted", "PLANTED", "Planted", "cGxhbnRlZ", "wbGFudGVk")


def leaks(text: object) -> list[str]:
    shown = text if isinstance(text, str) else repr(text)
    return [shown[max(0, shown.index(word) - 40) :][:90] for word in PLANTED if word in shown]


def outside_call() -> CallTrace:
    output = OutputTrace(
        index=0,
        message={"role": "assistant", "content": TEXT},
        finish_reason="stop",
        tokens=1,
        logprob_mean=None,
        logprob_min=None,
    )
    return CallTrace(
        id="outside-1",
        trajectory_id="t",
        model="openai/judge",
        step=0,
        status=CallStatus.COMPLETE,
        sampling=Sampling(),
        messages=({"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": TEXT}]},),
        tools=None,
        error=TEXT,
        started_at=1.0,
        ended_at=2.0,
        prompt_tokens=1,
        outputs=(output,),
    )


def careless() -> Trajectory:
    """A rollout of whose texts each has all keys."""
    told = Trajectory(captured=True, reward=1.0, metadata={TEXT: [{"deep": TEXT}], "api_key": OPAQUE}, logs=[TEXT])
    told.tool_runs = [ToolRun(tool_call_id="1", name="look", started_at=1, ended_at=2, error=TEXT, result=TEXT)]
    told.outside_calls = [outside_call()]
    told.metrics["right"] = 1.0
    return told


async def failing() -> Trajectory:
    raise ConnectionError(f"refused: {TEXT}") from ValueError(TEXT)


@pytest.fixture(autouse=True)
def _variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_API_KEY", VALUE)


async def test_a_planted_key_is_in_no_record_no_page_no_export_no_trace_and_no_error(
    gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    group = TrajectoryGroup([failing()], exceptions=[RuntimeError(TEXT)], metadata={"note": TEXT})
    [group] = await gather_trajectory_groups([group], max_exceptions=9)
    failed = Trajectory(captured=True, exception=as_rollout_exception(KeyError(TEXT)))
    group.trajectories += [careless(), failed]
    place = RolloutPlace(run="run-1", split="train", step=0, scenario="s", group="g-1")
    for index, trajectory in enumerate(group.trajectories):
        trajectory.place = place.filled(RolloutPlace(), index)
    group.place = place
    shown: list[object] = [details(failure_kinds(failures([group]))), caplog.text, group.exceptions]
    shown.append(group_wires([group], "default", "r"))
    api = Api(gateway.url)
    await api.finish(rollout_records([group], "default", place))
    rollouts = [rollout async for rollout in pages(api, TrajectoryQuery(run="run-1"))]
    shown += [json.dumps(rollout_line(rollout), default=repr) for rollout in rollouts]
    for rollout in rollouts:
        shown.append(await page(gateway, f"/trajectories/{rollout.record.id}"))
    shown += [await page(gateway, f"/runs/run-1{part}") for part in ("", "/steps/0", "/steps/0/groups/g-1")]
    shown += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(rollouts) == 4 and [leaks(text) for text in shown if leaks(text)] == []
    assert all(MARK in str(text) for text in shown[0:1])
    counts = {rollout.record.metrics[METRIC] for rollout in rollouts}
    assert min(counts) >= len(FORMS) and max(counts) > 5 * len(FORMS)


async def page(gateway: Gateway, path: str) -> str:
    answer = await gateway.http.get(path)
    assert answer.status_code == 200, path
    return answer.text


async def test_a_server_redacts_what_another_client_sends(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that is not ours plants keys in all that the public API takes as texts that are not trained."""
    protect_environment()  # as a server does at its start
    texts: dict[str, Json] = {"metadata": {TEXT: [{"deep": TEXT}]}, "metrics": {FORMS[3]: 1.0}}
    record = careless().model_dump(mode="json", include={"tool_runs", "outside_calls", "logs"}) | texts
    record |= {"exception": {"type": "E", "message": FORMS[0], "traceback": TEXT}, "started_at": 1.0, "ended_at": 2.0}
    record |= {"id": "t", "model": "default", "place": {"run": "run-1", "step": 0, "group": "g-1"}}
    queued: list[TrainRequest] = []

    async def submit(request: TrainRequest) -> TrainFeed:
        queued.append(request)
        await gateway.services.train_history.save(
            request, TrainStatus(id=request.id, model=request.model, state="queued")
        )
        feed = TrainFeed(request)
        feed.end(TrainResult(model=request.model, step=0, applied=False, request_id=request.id))
        return feed

    monkeypatch.setattr(gateway.services.training, "submit", submit)
    called = await gateway.chat({ORIGIN_HEADER: json.dumps({"tags": [FORMS[1]]})}, path="/t/t/v1")
    group: dict[str, Json] = {"trajectory_ids": ["t"], **texts}
    answers = [
        called,
        await gateway.http.post("/api/trajectories", json={"trajectories": [record]}),
        await gateway.http.post("/api/train", json={"id": "r", "model": "default", "groups": [group]}),
        await gateway.http.post("/api/models/default/log", json={"metrics": {FORMS[2]: 1.0}}),
    ]
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
    rollouts = [rollout async for rollout in pages(Api(gateway.url), TrajectoryQuery(run="run-1"))]
    shown: list[object] = [json.dumps(rollout_line(rollout), default=repr) for rollout in rollouts]
    places = ["/trajectories/t", "/api/trajectories/t", "/api/traces?run=run-1"]
    places += ["/runs/run-1", "/runs/run-1/steps/0", "/runs/run-1/steps/0/groups/g-1", "/api/models/default/log"]
    shown += [await page(gateway, place) for place in places]
    shown += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(rollouts) == 1 and [leaks(text) for text in shown if leaks(text)] == []
    assert rollouts[0].record.metrics[METRIC] > 5 * len(FORMS)
    assert queued[0].groups[0].metrics[METRIC] == 2 * len(TEXT.split(" ; ")) + 1


def test_messages_that_are_trained_and_ordinary_texts_stay() -> None:
    choice = {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": TEXT}}
    told = Trajectory.model_validate({"messages_and_choices": [{"role": "user", "content": TEXT}, choice]})
    told.logs = ["the bearer of bad news; task-1234567890123456; https://host:80/a@b; d[key]; basic needs; eyJ"]
    told.metadata = {"secret": "the treasure", "token": "abcdefghij", "n": 3, "none": None, "at": 1.5}
    [record] = rollout_records([told], "default", RolloutPlace())
    assert [message["content"] for message in record.histories[0].messages] == [TEXT, TEXT]
    assert (record.logs, record.metadata) == (tuple(told.logs), told.metadata) and METRIC not in record.metrics


def test_a_variable_keeps_records_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBOOK_REDACT", "0")
    [record] = rollout_records([careless()], "default", RolloutPlace())
    assert record.logs == (TEXT,) and record.metadata["api_key"] == OPAQUE


def test_a_file_that_a_variable_names_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_KEY", __file__)
    assert __file__ in as_rollout_exception(ValueError(__file__)).message


def test_two_passes_count_the_same_marks() -> None:
    first, second = Redaction(), Redaction()
    assert second.value(first.value([TEXT, {"password": OPAQUE}])) == first.value([TEXT, {"password": OPAQUE}])
    assert second.marks == len(FORMS) + 2


@pytest.mark.parametrize("write", [repr, json.dumps, str])
def test_a_value_is_found_in_every_writing(write: Callable[[Any], str]) -> None:
    protect(["planted+with/signs="])
    assert leaks(redact(write({"a": "planted+with/signs=", "url": "?k=planted%2Bwith%2Fsigns%3D"}))) == []


def test_a_rollout_costs_less_than_a_millisecond() -> None:
    text = '  File "/app/agent.py", line 31, in run\n    return self.task(risk, desk=1)\n' * 100
    told = Trajectory(captured=True, metadata={f"k{n}": "a short text" for n in range(20)}, logs=[text])
    told.exception = as_rollout_exception(ValueError(text))
    hostile = ("sk-" * 9_000, "eyJ-" * 9_000, "Basic " * 9_000, "-----BEGIN " + "A " * 9_000, "://a:" * 9_000)
    assert [redact(each) == each for each in hostile] == [True] * 5
    seconds: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        Redaction().value([told.metadata, told.logs, told.exception])
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 1e-3
