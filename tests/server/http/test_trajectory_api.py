"""Trajectories over HTTP: finishing, claiming, listing, looking."""

from __future__ import annotations

import json
from typing import Any

import pytest

from offbook.base.wire import RECORD_HEADER, TRAJECTORY_HEADER, TrajectoryWithCalls
from tests.fakes.gateway import Gateway
from tests.fakes.scripted_sampler import ScriptedChoice, ScriptedCompletion

JSON = {"content-type": "application/json"}


def a_record(trajectory_id: str, **changed: Any) -> dict[str, Any]:
    times = {"started_at": 1.0, "ended_at": 2.0}
    return {"id": trajectory_id, "model": "default", "reward": 0.5} | times | changed


async def finish(gateway: Gateway, *records: dict[str, Any]) -> tuple[int, Any]:
    response = await gateway.http.post("/api/trajectories", json={"trajectories": list(records)})
    return response.status_code, response.json()


async def test_a_finished_trajectory_is_shown_with_its_calls(gateway: Gateway) -> None:
    await gateway.chat({TRAJECTORY_HEADER: "run/1"})
    assert await finish(gateway, a_record("run/1", metadata={"q": "é"})) == (200, {"calls": {"run/1": 1}})
    shown = TrajectoryWithCalls.model_validate_json((await gateway.http.get("/api/trajectories/run/1")).text)
    assert shown.calls == await gateway.calls("run/1")
    assert shown.trajectory is not None and shown.trajectory.metadata == {"q": "é"}


async def test_weights_and_thrown_away_calls_are_shown_with_the_trajectory(gateway: Gateway) -> None:
    for _ in range(2):
        await gateway.chat({TRAJECTORY_HEADER: "run"})
    first, second = [call.id for call in await gateway.calls("run")]
    record = a_record("run", weights={first: 0.25}, unused=[second])
    assert await finish(gateway, record) == (200, {"calls": {"run": 2}})
    shown = (await gateway.http.get("/api/trajectories/run")).json()["trajectory"]
    assert (shown["weights"], shown["unused"]) == ({first: 0.25}, [second])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
async def test_numbers_that_json_cannot_give_back_are_refused_wherever_they_are_in_metadata(
    gateway: Gateway, number: str
) -> None:
    body = json.dumps({"trajectories": [a_record("t", metadata={"a": 1, "b": [0, {"c": "HERE"}]})]})
    raw = await gateway.http.post("/api/trajectories", content=body.replace('"HERE"', number), headers=JSON)
    assert raw.status_code == 400, raw.text
    fault = raw.json()["error"]
    assert fault["param"] == "trajectories.0.metadata.b"
    assert f"{float(number)!r} at [1]['c']" in fault["message"]
    assert (await gateway.http.get("/api/trajectories")).json() == {"trajectories": [], "next": None}


async def test_numbers_that_json_cannot_give_back_are_refused_in_a_users_state_and_a_groups_metadata(
    gateway: Gateway,
) -> None:
    path, typed = "/api/models/default/state", {"content-type": "application/json"}
    state = await gateway.http.put(path, content=b'{"value": {"best": NaN}}', headers=typed)
    assert state.status_code == 400 and "value.best" in state.text and "got nan" in state.text
    assert (await gateway.http.get(path)).json() == {"value": {}}
    groups = b'{"model": "default", "groups": [{"trajectory_ids": ["t"], "metadata": {"q": [-Infinity]}}]}'
    train = await gateway.http.post("/api/train", content=groups, headers=typed)
    assert train.status_code == 400 and "groups.0.metadata.q" in train.text and "-inf at [0]" in train.text


async def test_choices_appended_to_trajectories_are_claimed_by_their_marks(gateway: Gateway) -> None:
    gateway.sampler.completions.append(
        ScriptedCompletion((ScriptedChoice(), ScriptedChoice(token_ids=((21, 22), (23,)))))
    )
    answer = (await gateway.chat({RECORD_HEADER: "1"}, n=2)).json()
    refs = [
        {"call_id": choice["offbook"]["call_id"], "index": choice["offbook"]["index"]} for choice in answer["choices"]
    ]
    status, body = await finish(gateway, a_record("a", calls=refs[:1]), a_record("b", calls=refs[1:]))
    assert (status, body) == (200, {"calls": {"a": 1, "b": 1}})
    assert [call.outputs[0].token_ids for name in "ab" for call in await gateway.calls(name)] == [
        (11, 12, 13),
        (21, 22, 23),
    ]
    status, body = await finish(gateway, a_record("c", calls=refs[:1]))
    assert (status, body["error"]["code"]) == (409, "claimed_twice")
    assert "'a'" in body["error"]["message"] and "'c'" in body["error"]["message"]


async def test_bad_trajectories_are_refused_with_the_fields_name(gateway: Gateway) -> None:
    cases: list[tuple[dict[str, Any], int, str]] = [
        (a_record("t", reward="high"), 400, "reward"),
        (a_record("t", prize=1), 400, "prize"),
        (a_record(""), 400, "id"),
        (a_record("t", weights={"call-0": -1}), 400, "weights.call-0"),
        (a_record("t", weights={"call-0": 1}), 404, "weights names call 'call-0'"),
        (a_record("t", unused=["call-0"]), 404, "unused names call 'call-0'"),
        (a_record("t", calls=[{"call_id": "call-0", "index": 0}]), 404, "call-0"),
    ]
    for record, status, says in cases:
        found, body = await finish(gateway, record)
        assert (found, says in body["error"]["message"]) == (status, True), body
    raw = await gateway.http.post(
        "/api/trajectories", content=b'{"trajectories": [{"id": "t", "reward": NaN}]}', headers=JSON
    )
    assert raw.status_code == 400 and "reward" in raw.text
    raw = await gateway.http.post(
        "/api/trajectories", content=b'{"trajectories": [{"id": "t", "weights": {"c": NaN}}]}', headers=JSON
    )
    assert raw.status_code == 400 and "weights.c" in raw.text
    assert (await gateway.http.get("/api/trajectories")).json() == {"trajectories": [], "next": None}


@pytest.mark.parametrize(
    ("message", "target", "said"),
    [
        ({"role": "assistant", "content": "a"}, 1, "targets holds 1, but there are 1 messages"),
        ({"role": "assistant", "content": "a"}, -1, "targets holds -1"),
        ({"role": "user", "content": "a"}, 0, "only an assistant's is trained"),
        ({"role": "assistant", "content": [1]}, 0, "messages[0] is no chat message"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"function": "f"}]}, 0, "messages[0] is no chat message"),
    ],
)
async def test_a_history_that_cannot_be_trained_is_refused_by_name(
    gateway: Gateway, message: dict[str, object], target: int, said: str
) -> None:
    history = {"messages": [message], "targets": [target]}
    status, body = await finish(gateway, a_record("a", calls=[], histories=[history]))
    assert status == 400 and body["error"]["param"] == "trajectories.0.histories", body
    assert said in body["error"]["message"]


@pytest.mark.parametrize("seconds", [-1.0, 1e12, 1e300])
async def test_a_time_that_no_calendar_shows_is_refused_by_name(gateway: Gateway, seconds: float) -> None:
    status, body = await finish(gateway, a_record("a", ended_at=seconds))
    assert status == 400 and body["error"]["param"] == "trajectories.0.ended_at", body


async def test_trajectories_are_listed_in_pages_and_by_model(gateway: Gateway) -> None:
    for at in range(4):
        await finish(gateway, a_record(f"t{at}", ended_at=float(at), model="default" if at % 2 else "other"))
    first = (await gateway.http.get("/api/trajectories", params={"limit": 1})).json()
    page = (await gateway.http.get("/api/trajectories", params={"limit": 2, "after": first["next"]})).json()
    assert [record["id"] for record in page["trajectories"]] == ["t2", "t1"]
    other = (await gateway.http.get("/api/trajectories?model=other")).json()
    assert [record["id"] for record in other["trajectories"]] == ["t2", "t0"]
    for query in ("limit=0", "offset=1", "limit=x", "after=-1", "after=t1", "run=", "step=-1", "scored=maybe"):
        assert (await gateway.http.get(f"/api/trajectories?{query}")).status_code == 400


async def test_trajectories_are_listed_by_their_place_and_their_end(gateway: Gateway) -> None:
    place = {"run": "a run/1", "split": "val", "step": 3, "scenario": "blue & teal", "group": "g", "index": 0}
    failed = {"type": "ValueError", "message": "away", "traceback": ""}
    await gateway.chat({TRAJECTORY_HEADER: "both"})
    await finish(gateway, a_record("both", model="planner", place=place), a_record("other", place=place | {"run": "b"}))
    await finish(gateway, a_record("lost", reward=None, exception=failed, place={"run": "a run/1"}))
    asked: dict[str, tuple[dict[str, Any], list[str]]] = {
        "two models": ({"model": "default"}, ["lost", "other", "both"]),
        "one of them": ({"model": "planner"}, ["both"]),
        "run": ({"run": "a run/1"}, ["lost", "both"]),
        "scenario": ({"scenario": "blue & teal", "split": "val", "step": 3}, ["other", "both"]),
        "group and run": ({"group": "g", "run": "b"}, ["other"]),
        "failed": ({"failed": "true"}, ["lost"]),
        "neither": ({"failed": "false", "scored": "true", "model": "default"}, ["other", "both"]),
    }
    for case, (query, expected) in asked.items():
        page = (await gateway.http.get("/api/trajectories", params=query)).json()
        assert ([record["id"] for record in page["trajectories"]], page["next"]) == (expected, None), case
    refused = await gateway.http.get("/api/trajectories", params={"runs": "a"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "runs"
    for wrong in ({"step": -1}, {"split": ""}, {"run": "x" * 501}, {"place": 1}):
        status, body = await finish(gateway, a_record("t", place=wrong))
        assert status == 400 and f"place.{next(iter(wrong))}" in body["error"]["param"]


async def test_an_unknown_trajectory_is_a_404_that_names_it(gateway: Gateway) -> None:
    response = await gateway.http.get("/api/trajectories/nobody")
    assert response.status_code == 404 and "'nobody'" in response.text


async def test_traces_have_calls_with_counts_in_place_of_tokens(gateway: Gateway) -> None:
    await gateway.chat({TRAJECTORY_HEADER: "seen"})
    await finish(gateway, a_record("seen", place={"run": "r", "group": "g"}), a_record("other", place={"run": "b"}))
    page = (await gateway.http.get("/api/traces", params={"run": "r"})).json()
    [rollout] = page["rollouts"]
    [call] = (await gateway.http.get("/api/trajectories/seen")).json()["calls"]
    [trace] = rollout["calls"]
    assert (rollout["record"]["id"], page["next"]) == ("seen", None)
    assert "prompt_ids" not in trace and trace["prompt_tokens"] == len(call["prompt_ids"])
    [output], [shown] = call["outputs"], trace["outputs"]
    assert "token_ids" not in shown and shown["tokens"] == len(output["token_ids"])
    assert shown["logprob_mean"] == pytest.approx(sum(output["logprobs"]) / len(output["logprobs"]))
    assert shown["logprob_min"] == pytest.approx(min(output["logprobs"]))
    same = ("id", "model", "step", "messages", "tools", "sampling", "status", "started_at", "ended_at")
    assert {name: trace[name] for name in same} == {name: call[name] for name in same}
    assert (await gateway.http.get("/api/traces", params={"runs": "r"})).status_code == 400
