"""Back in from Langfuse: real users' inputs as scenarios, datasets in both directions, experiments and prompts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from offbook import Scenario, Trajectory
from offbook.base.errors import ConfigError
from offbook.client.rollouts.capture import capturing
from offbook.contracts import DeliveryError, GroupsFinished
from offbook.scenarios.identity import scenario_text
from offbook.testing.sinks import sample_rollout
from offbook_langfuse import (
    LangfuseConnection,
    dataset_scenarios,
    managed_prompt,
    save_dataset,
    scenarios_from_traces,
)
from offbook_langfuse.sink import LangfuseSink, score_body, send_scores
from tests.fakes.scripted_api import Asked, Reply, scripted_api
from tests.fakes.trace_server import PUBLIC, SECRET, TraceServer, trace_server


@pytest.fixture
def server() -> Iterator[TraceServer]:
    with trace_server() as served:
        yield served


def connection(server: TraceServer) -> LangfuseConnection:
    return LangfuseConnection(server.url, PUBLIC, SECRET)


def trace(number: int, input: object, environment: str = "production", **more: object) -> dict[str, object]:
    began = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=number)
    facts = {"id": f"root-{number}", "traceId": f"trace-{number}", "environment": environment, "tags": ["shop"],
             "startTime": began.isoformat()}  # fmt: skip
    return {**facts, "input": json.dumps(input), "output": json.dumps(f"answer {number}"), "traceName": "agent", **more}


def test_low_scored_traces_of_real_users_become_scenarios_with_what_was_answered(server: TraceServer) -> None:
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "where?"},
    ]
    server.observations = [
        trace(1, {"messages": messages}),
        trace(2, "a plain text"),
        trace(3, "a plain text"),  # the same again
        trace(4, {"question": "why?"}, environment="staging"),
        trace(5, {"question": "how?"}),
    ]
    server.kept_scores = [
        {"name": "helpfulness", "value": value, "subject": {"kind": "trace", "id": f"trace-{number}"}}
        for number, value in ((1, 0.2), (2, 0.5), (3, 0.1), (5, 0.9))
    ]
    everything = scenarios_from_traces(connection=connection(server))
    assert [each.id for each in everything] == ["trace-5", "trace-4", "trace-3", "trace-1"]
    low = scenarios_from_traces(
        {"environment": "production"}, low_score="helpfulness<0.5", connection=connection(server)
    )
    assert [(each.id, each.prompt, each["answer"], each["score"]) for each in low] == [
        ("trace-3", "a plain text", "answer 3", 0.1), ("trace-1", "where?", "answer 1", 0.2),
    ]  # fmt: skip
    assert low[1]["input"] == {"messages": messages} and scenario_text(low[0]) == "a plain text"
    newest = scenarios_from_traces(limit=2, tags=["shop"], connection=connection(server))
    assert [each.prompt for each in newest] == ["how?", "why?"]


def test_traces_that_offbook_sent_are_left_out_and_the_server_filters(server: TraceServer) -> None:
    server.observations = [trace(1, "a"), trace(2, "b", traceName=None, name="agent"), trace(3, "c", traceName="other")]
    LangfuseSink(connection(server)).groups_finished(GroupsFinished("run", "train", 0, ("g",), (sample_rollout(0),)))

    def ids(**wanted: Any) -> list[str]:
        server.requests.clear()
        return [str(each.id) for each in scenarios_from_traces(connection=connection(server), **wanted)]

    assert ids() == ["trace-3", "trace-2", "trace-1"]
    assert ids(name="agent") == ["trace-2", "trace-1"]
    assert ids(trace_ids=["trace-3"], tags=["shop"]) == ["trace-3"] and len(server.requests) == 1
    assert ids(to_time=datetime(2026, 1, 3, tzinfo=UTC), limit=1) == ["trace-1"]
    assert len(ids(tags=["offbook"])) == 1
    server.kept_scores = [
        {"name": "help", "value": 0.1, "subject": {"kind": "trace", "id": f"trace-{number}"}} for number in (1, 3)
    ]
    assert ids(low_score="help<0.5") == ["trace-3", "trace-1"]
    server.observations += [trace(number, f"text {number}") for number in range(100, 300)]
    assert ids(low_score="help<0.5", name="agent") == ["trace-1"] and len(server.requests) < 5


def test_a_filter_that_nothing_fits_or_nobody_knows_is_said(server: TraceServer) -> None:
    server.observations = [trace(1, "hello")]
    assert scenarios_from_traces(tags=["bank"], connection=connection(server)) == []
    assert scenarios_from_traces(low_score="helpfulness<0.5", connection=connection(server)) == []
    with pytest.raises(ConfigError, match="filter: there is no 'env'; there are name, environment"):
        scenarios_from_traces({"env": "x"}, connection=connection(server))  # type: ignore[typeddict-unknown-key]
    with pytest.raises(ConfigError, match="low_score: 'helpfulness' is not of the form"):
        scenarios_from_traces(low_score="helpfulness", connection=connection(server))
    with pytest.raises(ConfigError, match="a time needs a time zone"):
        scenarios_from_traces(from_time=datetime(2026, 1, 1), connection=connection(server))
    assert scenarios_from_traces(from_time=datetime(2026, 1, 1, tzinfo=UTC), connection=connection(server))
    with pytest.raises(ConfigError, match="refused the keys"):
        scenarios_from_traces(connection=LangfuseConnection(server.url, PUBLIC, "sk-other"))
    with pytest.raises(ConnectionError, match="no answer from Langfuse"):
        scenarios_from_traces(connection=LangfuseConnection("http://127.0.0.1:9", PUBLIC, SECRET))


def test_scenarios_come_back_from_a_dataset_as_they_went(server: TraceServer) -> None:
    given = [
        Scenario.model_validate({"id": "box-1", "prompt": "Where is box 1?", "answer": "3"}),
        {"id": "box-2", "question": "And 2?", "hints": ["left"], "expected": {"shelf": 4}},
        "a text",
    ]
    assert save_dataset("shelves/all", given, connection=connection(server)) == 3
    assert save_dataset("shelves/all", given, connection=connection(server)) == 3
    stored = server.datasets["shelves/all"]
    assert len(stored) == 3 and stored["box-1"]["expectedOutput"] == {"value": "3"}
    first, second, third = dataset_scenarios("shelves/all", connection=connection(server))
    assert (first.id, first.prompt, first["answer"]) == ("box-1", "Where is box 1?", "3")
    assert (second["question"], second["hints"], second["expected"]) == ("And 2?", ["left"], {"shelf": 4})
    assert third.prompt == "a text"
    with pytest.raises(ConfigError, match="expected='label', but scenario 'box-1' has no such field"):
        save_dataset("shelves", given, expected="label", connection=connection(server))
    with pytest.raises(ConfigError, match="404 to GET /api/public/v2/datasets/none"):
        dataset_scenarios("none", connection=connection(server))


def test_an_evaluation_is_an_experiment_on_the_dataset(server: TraceServer) -> None:
    save_dataset("boxes", [{"id": "box-0", "prompt": "?", "answer": "7"}], connection=connection(server))
    sink = LangfuseSink(connection(server), dataset="boxes")
    rollout = sample_rollout(0, split="val", step=2)
    sink.groups_finished(GroupsFinished("run", "val", 2, ("g",), (rollout,)))
    assert server.faults_found() == []
    [root] = [span.id for span in server.spans.values() if not span.parent]
    for span in server.spans.values():
        own = {name.removeprefix("langfuse.experiment."): value for name, value in span.attributes.items()
               if name.startswith("langfuse.experiment.")}  # fmt: skip
        assert json.loads(own.pop("metadata")) == {"model": "agent", "step": 2, "split": "val", "run": "run"}
        assert own == {
            "id": "run/val@step-2", "name": "agent step 2 val (run)", "dataset.id": "dataset-boxes", "item.id": "box-0",
            "item.expected_output": '"7"', "item.root_observation_id": root,
            "description": "Offbook evaluated agent step 2 on the split val of run run.",
        }  # fmt: skip


def test_a_managed_prompt_is_noted_on_the_rollout_that_uses_it(server: TraceServer) -> None:
    server.prompts = {
        "greet": {"name": "greet", "version": 3, "prompt": "Hello {{ name }}", "config": {"temperature": 0.2}},
        "chat": {"name": "chat", "version": 1, "prompt": [{"role": "system", "content": "Serve {{shop}}."}]},
    }
    prompt = managed_prompt("greet", connection=connection(server))
    assert (prompt.version, prompt.config) == (3, {"temperature": 0.2})

    async def rollout() -> Trajectory:
        trajectory = Trajectory()
        with capturing(trajectory):
            assert prompt.compile(name="Ann") == "Hello Ann"
        return trajectory

    assert asyncio.run(rollout()).metadata == {"prompt": "greet@3"}
    chat = managed_prompt("chat", label="production", connection=connection(server))
    assert chat.compile(shop="us") == [{"role": "system", "content": "Serve us."}]
    with pytest.raises(ConfigError, match="prompt 'greet' version 3: no value for name"):
        prompt.compile()
    with pytest.raises(ConfigError, match="a version or a label, not both"):
        managed_prompt("greet", version=1, label="x", connection=connection(server))
    with pytest.raises(ConfigError, match="404"):
        managed_prompt("gone", connection=connection(server))


HOSTILE: dict[str, Any] = {
    "a list": [1],
    "data that is no list": {"data": {"a": 1}},
    "items that are no objects": {"data": [1, None]},
    "a cursor that comes twice": {"data": [], "meta": {"cursor": "again", "totalPages": 1}},
    "a cursor that is no text": {"data": [], "meta": {"cursor": {"a": 1}, "totalPages": "x"}},
    "a meta that is no object": {"data": [], "meta": [1]},
    "pages without end": {"data": [], "meta": {"totalPages": 10**9}},
    "items of other types": {
        "data": [
            {"id": 3, "traceId": [1], "input": "[" * 500, "startTime": 5, "subject": "x", "value": "y", "metadata": 7}
        ],
        "meta": None,
    },
    "an input that is no JSON": {"data": [{"id": "a", "traceId": "a", "input": "NaN", "output": '"\\ud800"'}]},
    "an item that is no scenario": {"data": [{"id": "a", "input": {"prompt": 3}, "expectedOutput": {"value": 1}}]},
    "a prompt that is none": {"prompt": 7, "version": "x", "name": "n"},
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_whatever_langfuse_answers_is_read_or_an_error_that_names_it(body: object) -> None:
    with scripted_api(lambda asked: Reply(json=body)) as api:
        there = LangfuseConnection(api.url, PUBLIC, SECRET)
        for read in (
            lambda: scenarios_from_traces(connection=there),
            lambda: scenarios_from_traces(low_score="a<1", connection=there),
            lambda: dataset_scenarios("d", connection=there),
            lambda: managed_prompt("p", connection=there),
        ):
            with contextlib.suppress(ConfigError):
                read()
        assert len(api.asked) < 12


@pytest.mark.parametrize("text", ["<html>", "[" * 100_000, ""])
def test_an_answer_that_is_no_json_is_told(text: str) -> None:
    with scripted_api(lambda asked: Reply(text=text)) as api, pytest.raises(ConfigError, match="with no JSON"):
        scenarios_from_traces(connection=LangfuseConnection(api.url, PUBLIC, SECRET))


def test_pages_without_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbook_langfuse.connection.MAX_PAGES", 5)

    def script(asked: Asked) -> Reply:
        item = {"id": "a", "input": {"question": "why?"}, "traceId": "a"}
        return Reply(json={"data": [item], "meta": {"totalPages": 10**9, "cursor": str(len(api.asked))}})

    with scripted_api(script) as api:
        there = LangfuseConnection(api.url, PUBLIC, SECRET)
        for read in (lambda: scenarios_from_traces(connection=there), lambda: dataset_scenarios("d", connection=there)):
            with pytest.raises(ConfigError, match="more than 5 pages"):
                read()
        assert len(api.asked) == 5 + 6


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbook_langfuse.connection.MAX_BYTES", 1_000)
    with (
        scripted_api(lambda asked: Reply(text=" " * 2_000)) as api,
        pytest.raises(ConfigError, match="more than 1,000 bytes"),
    ):
        scenarios_from_traces(connection=LangfuseConnection(api.url, PUBLIC, SECRET))


@pytest.mark.parametrize("status", [301, 307, 308])
def test_nothing_is_sent_where_langfuse_redirects_to(status: int) -> None:
    with scripted_api() as other, scripted_api(lambda asked: Reply(status, location=f"{other.url}/taken")) as api:
        there = LangfuseConnection(api.url, PUBLIC, SECRET)
        for read in (
            lambda: scenarios_from_traces(connection=there),
            lambda: save_dataset("d", ["a secret prompt"], connection=there),
            there.check,
        ):
            with pytest.raises(ConfigError, match=f"redirects .*{other.url}/taken"):
                read()
        with pytest.raises(DeliveryError, match=f"answered {status}"):
            send_scores(there, [score_body("a", "reward", 1.0, 0.0, traceId="t")], 5.0)
    assert other.asked == []


def test_keys_that_users_wrote_are_in_no_scenario(server: TraceServer, caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-" + "a1B2" * 8
    server.observations = [trace(1, {"question": f"why does {key} fail?"}, output=json.dumps({"api_key": key}))]
    (scenario,) = scenarios_from_traces(connection=connection(server))
    assert scenario.prompt == "why does [redacted key] fail?" and key not in scenario.model_dump_json()
    assert "3 keys replaced" in caplog.text
