"""What a train request carries, what is refused before it leaves, and what a broken connection does to it."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice

import offbook
from offbook.base.errors import (
    ConfigError,
    ServerError,
    TrainError,
    UnreachableError,
)
from offbook.base.wire import TrainEvent
from tests.fakes.scripted_api import Asked, Reply, result, scripted_api

NOBODY = "http://127.0.0.1:9"


def choice(text: str, call_id: str | None = None, index: int = 0) -> Choice:
    mark = {"offbook": {"call_id": call_id, "index": index}} if call_id else {}
    message = {"role": "assistant", "content": text}
    return Choice.model_validate({"index": index, "finish_reason": "stop", "message": message, **mark})


def rollout(call_id: str = "call-1", reward: float | None = 1.0) -> offbook.Trajectory:
    asked = {"role": "user", "content": "hi"}
    return offbook.Trajectory(messages_and_choices=[asked, choice("yes", call_id)], reward=reward)


def model_at(url: str, **options: Any) -> offbook.TrainableModel:
    return offbook.TrainableModel("agent", base_model="tiny", backend=offbook.RemoteBackend(url, **options))


async def test_a_request_carries_calls_rewards_metadata_and_options() -> None:
    first, second = rollout("call-1", 1), rollout("call-2", 0)
    second.additional_histories = [offbook.History(messages_and_choices=[choice("sub", "call-3", index=2)])]
    second.metrics["tries"], second.metadata["board"], second.logs = 3, "a", ["looked"]
    group = offbook.TrajectoryGroup([first, second, ValueError("x")], metadata={"scenario": 7})
    with scripted_api() as api:
        done = await model_at(api.url, api_key="secret").train([group], offbook.TrainConfig(learning_rate=3e-5))
        [finished] = api.bodies("/api/trajectories")
        [request] = api.bodies("/api/train")
        assert all(asked.headers["authorization"] == "Bearer secret" for asked in api.asked)
    one, two, failed = finished["trajectories"]
    assert (one["id"], one["calls"], one["histories"], one["reward"]) == (
        first.id,
        [{"call_id": "call-1", "index": 0}],
        [],
        1.0,
    )
    assert two["calls"] == [{"call_id": "call-2", "index": 0}, {"call_id": "call-3", "index": 2}]
    assert (two["metrics"]["tries"], two["metadata"], two["logs"]) == (3.0, {"board": "a"}, ["looked"])
    assert (failed["calls"], failed["reward"], failed["exception"]["type"]) == ([], None, "ValueError")
    assert request["groups"] == [
        {"trajectory_ids": [first.id, second.id, failed["id"]], "metadata": {"scenario": 7}, "metrics": {}}
    ]
    assert (request["model"], request["config"]["learning_rate"]) == ("agent", 3e-5)
    assert (done.step, done.applied, done.request_id) == (1, True, request["id"])


async def test_a_request_sent_again_names_the_same_trajectories_also_for_rollouts_that_left_only_an_exception() -> None:
    group = offbook.TrajectoryGroup([rollout("call-1", 1), rollout("call-2", 0), ValueError("x"), ValueError("y")])
    with scripted_api() as api:
        for request_id in ("once", "once", "other"):
            await model_at(api.url).train([group], request_id=request_id)
        first, again, other = ([*body["groups"][0]["trajectory_ids"]] for body in api.bodies("/api/train"))
    assert first == again
    assert len(set(first)) == 4
    assert not set(first[2:]) & set(other)


async def test_a_captured_rollout_sends_no_list_of_calls() -> None:
    captured = offbook.Trajectory(reward=1, captured=True)
    with scripted_api() as api:
        await model_at(api.url).train([offbook.TrajectoryGroup([captured, rollout()])])
        assert api.bodies("/api/trajectories")[0]["trajectories"][0]["calls"] is None


async def test_a_choice_of_another_endpoint_is_rendered_and_plain_assistant_messages_stay_context() -> None:
    items = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        choice("c"),
        choice("d", "call-9"),
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    mixed = offbook.Trajectory(messages_and_choices=items, tools=[tool], reward=1)
    with scripted_api() as api:
        await model_at(api.url).train([offbook.TrajectoryGroup([mixed, rollout()])])
        record = api.bodies("/api/trajectories")[0]["trajectories"][0]
    assert record["calls"] == [{"call_id": "call-9", "index": 0}]
    [history] = record["histories"]
    assert (history["targets"], history["tools"]) == ([2], [tool])
    assert [message["content"] for message in history["messages"]] == ["a", "b", "c", "d"]


async def test_many_rollouts_are_finished_in_bodies_below_the_servers_limit() -> None:
    long = [rollout(f"call-{i}") for i in range(6)]
    for trajectory in long:
        trajectory.logs = ["x" * 1_500_000]
    with scripted_api() as api:
        await model_at(api.url).train([offbook.TrajectoryGroup(long)])
        sizes = [len(body["trajectories"]) for body in api.bodies("/api/trajectories")]
        assert sizes == [2, 2, 2]
        assert max(int(a.headers.get("content-length", 0)) for a in api.asked) < 5 * 2**20


def bad_groups() -> dict[str, tuple[Any, str]]:
    nan, infinite, text, metric, secret, huge, whole = (rollout() for _ in range(7))
    huge.reward, whole.reward = -1.5e100, 10**400
    nan.reward, infinite.reward, text.reward = math.nan, -math.inf, "good"  # type: ignore[assignment]
    metric.metrics["speed"], secret.metadata["client"] = math.inf, object()
    twice = rollout()
    plain = offbook.Trajectory(messages_and_choices=[{"role": "assistant", "content": "hi"}], reward=1)
    group = offbook.TrajectoryGroup
    return {
        "nan": (
            [group([rollout()]), group([rollout(), nan])],
            rf"{nan.id} \(group 1, rollout 1\): reward must be finite",
        ),
        "infinite": ([group([infinite])], r"got -inf"),
        "text": ([group([text])], r"reward must be a number or None \(unscored\), got 'good'"),
        "metric": ([group([metric])], r"metrics\['speed'\] must be finite, got inf"),
        "huge": (
            [group([huge])],
            rf"{huge.id} \(group 0, rollout 0\): reward must be within \+-1e\+100, got -1.5e\+100: scale it",
        ),
        "whole": ([group([whole])], r"reward must be a number"),
        "metadata": ([group([secret])], r"metadata\['client'\] is not JSON"),
        "no call": ([group([plain])], rf"{plain.id} \(group 0, rollout 0\) has no model call"),
        "twice": ([group([twice]), group([twice])], r"is the same rollout as group 0, rollout 0"),
        "one group": (group([rollout()]), r"pass a list of groups"),
        "an unscored group": ([None], "NoneType; .*leave out groups that a judge could not score"),
        "trajectories": ([rollout()], r"groups\[0\] is a Trajectory; expected a TrajectoryGroup"),
        "none": ([], r"at least one group"),
        "not gathered": ([group([lambda: None])], r"gather_trajectory_groups first"),  # type: ignore[list-item]
    }


@pytest.mark.parametrize("case", list(bad_groups()))
async def test_what_cannot_be_trained_is_refused_by_name_before_a_train_request_leaves(case: str) -> None:
    groups, message = bad_groups()[case]
    with scripted_api() as api:
        with pytest.raises(ConfigError, match=message):
            await model_at(api.url).train(groups)
        assert api.bodies("/api/train") == []


async def test_rewards_that_have_no_mean_are_refused_by_name_where_they_are_logged() -> None:
    huge, fast = rollout(), rollout()
    huge.reward, fast.metrics["speed"] = 1e308, 1e308
    with scripted_api() as api:
        for trajectory, named in ((huge, "reward"), (fast, r"metrics\['speed'\]")):
            with pytest.raises(ConfigError, match=rf"{trajectory.id}: {named} must be within"):
                await model_at(api.url).log([trajectory, trajectory])


async def test_a_captured_rollout_without_recorded_calls_is_named() -> None:
    def script(request: Asked) -> Reply | None:
        if request.path != "/api/trajectories":
            return None
        return Reply(json={"calls": {record["id"]: 0 for record in request.body["trajectories"]}})

    silent = offbook.Trajectory(reward=1, captured=True)
    with (
        scripted_api(script) as api,
        pytest.raises(ConfigError, match=f"no call under 1 captured rollout, such as .*{silent.id}"),
    ):
        await model_at(api.url).train([offbook.TrajectoryGroup([silent])])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"config": {"learning_rat": 1}},
            "TrainConfig: there is no option 'learning_rat': did you mean 'learning_rate'",
        ),
        ({"config": {"beta": 0.1}}, "no option 'beta': use kl_coef"),
        ({"learning_rate": 7}, "TrainConfig.learning_rate: .*less than or equal to 1 .got 7"),
        ({"betas": (0.9, 1.0)}, r"TrainConfig.betas.1: .*less than 1 .got 1.0"),
        ({"config": offbook.TrainConfig(), "epochs": 2}, r"either config= or single options, not both .*\['epochs'\]"),
        ({"config": 1e-5}, "expected a TrainConfig or a dict"),
    ],
)
async def test_wrong_options_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await model_at(NOBODY).train([offbook.TrajectoryGroup([rollout()])], **given)


async def test_a_stream_that_breaks_is_joined_again_under_the_same_id_until_the_result() -> None:
    tries: list[Asked] = []
    going = {"kind": "progress", "phase": "update", "done": 1, "total": 4}

    def script(request: Asked) -> Reply | None:
        if request.path != "/api/train":
            return None
        tries.append(request)
        replies = [
            Reply(cut=True),
            Reply(events=(going,)),
            Reply(events=(going,)),
            Reply(503, {"error": {"message": "busy"}}),
        ]
        return replies[len(tries) - 1] if len(tries) <= 4 else Reply(events=(result(request, step=5),))

    seen: list[TrainEvent] = []
    with scripted_api(script) as api:
        done = await model_at(api.url).train([offbook.TrajectoryGroup([rollout()])], on_event=seen.append, timeout=60)
    assert done.step == 5 and len(tries) == 5
    assert len({json.dumps(request.body) for request in tries}) == 1
    told = [(event.phase, event.done, event.total) for event in seen]
    assert told == [("update", 1, 4)]  # once, though it came twice


async def test_texts_of_events_may_hold_unicodes_line_separators() -> None:
    text = "row\u2028two\u2029three\x85four"

    def script(request: Asked) -> Reply | None:
        if request.path != "/api/train":
            return None
        return Reply(events=({"kind": "warning", "message": text}, result(request, step=5)))

    seen: list[TrainEvent] = []
    with scripted_api(script) as api:
        done = await model_at(api.url).train([offbook.TrajectoryGroup([rollout()])], on_event=seen.append, timeout=60)
    assert done.step == 5 and [event.message for event in seen] == [text]


async def test_a_step_that_was_not_applied_is_an_error_with_its_reason() -> None:
    fault = {"message": "out of memory: lower row_tokens", "code": "out_of_memory", "param": None}

    def script(request: Asked) -> Reply | None:
        return Reply(events=({"kind": "error", "error": fault},)) if request.path == "/api/train" else None

    with (
        scripted_api(script) as api,
        pytest.raises(TrainError, match=r"'agent' was not applied: .*lower row_tokens") as e,
    ):
        await model_at(api.url).train([offbook.TrajectoryGroup([rollout()])])
    assert e.value.reason == "out_of_memory"


async def test_a_train_request_without_a_result_in_time_names_its_id() -> None:
    free = threading.Event()

    def script(request: Asked) -> Reply | None:
        return Reply(events=(), wait_for=free) if request.path == "/api/train" else None

    with scripted_api(script) as api:
        with pytest.raises(TimeoutError, match="send it again with request_id='mine'"):
            await model_at(api.url).train([offbook.TrajectoryGroup([rollout()])], timeout=0.3, request_id="mine")
        free.set()


async def test_a_refusal_carries_status_code_and_field() -> None:
    fault = {"message": "no model 'agent'; there are: default", "code": "model_not_found", "param": "model"}

    def script(request: Asked) -> Reply | None:
        return Reply(404, {"error": fault}) if request.path == "/api/train" else None

    with scripted_api(script) as api, pytest.raises(ServerError, match="there are: default") as caught:
        await model_at(api.url).train([offbook.TrajectoryGroup([rollout()])])
    error = caught.value
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


async def test_a_wrong_key_says_how_to_give_one() -> None:
    fault = {"message": "wrong key", "code": "invalid_api_key", "param": None}
    wrong = pytest.raises(ServerError, match=r"wrong key \(pass api_key=, or set OFFBOOK_API_KEY\)")
    with scripted_api(lambda request: Reply(401, {"error": fault})) as api, wrong:
        await model_at(api.url).get_step()


async def test_an_answer_of_something_else_is_not_taken_for_ours() -> None:
    strange = pytest.raises(ServerError, match="answered 404, not in the shape of an Offbook server")
    with scripted_api(lambda request: Reply(404, "nginx")) as api, strange:
        await model_at(api.url).get_step()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(text="<html>"), "with something that is not JSON: '<html>'"),
        (Reply(308, location="https://box/"), "redirects to https://box/: give the server's own URL"),
    ],
)
async def test_what_a_proxy_answers_is_named(reply: Reply, message: str) -> None:
    with scripted_api(lambda request: reply) as api, pytest.raises(ServerError, match=message):
        await model_at(api.url).get_step()


async def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbook.client.connection.http.FIRST_SECONDS", 0.2)
    with pytest.raises(UnreachableError, match=r"no answer from the server at http://127.0.0.1:9 .*is it running"):
        await model_at(NOBODY).get_step()


async def test_the_environment_names_the_server_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_api() as api:
        monkeypatch.setenv("OFFBOOK_URL", api.url)
        monkeypatch.setenv("OFFBOOK_API_KEY", "from-the-environment")
        model = offbook.TrainableModel("agent", base_model="tiny")
        await model.train([offbook.TrajectoryGroup([rollout()])])
        assert api.asked[0].headers["authorization"] == "Bearer from-the-environment"
        assert repr(model.backend) == f"RemoteBackend({api.url!r})"


@pytest.mark.parametrize("url", ["gpu-box:8000", "ftp://x", "", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="url: "):
        offbook.RemoteBackend(url)


def test_other_trainers_arguments_are_answered_with_ours() -> None:
    with pytest.raises(ConfigError, match=r"LocalBackend: there is no option 'base_url': use RemoteBackend\(url\)"):
        offbook.LocalBackend(base_url="http://box")
    with pytest.raises(ConfigError, match=r"TrainableModel: there is no option 'run_name': use name="):
        offbook.TrainableModel("a", base_model="tiny", run_name="a-1")
    with pytest.raises(ConfigError, match=r"LocalBackend: there is no option 'treads': did you mean 'threads'"):
        offbook.LocalBackend(treads=1)
    with pytest.raises(ConfigError, match="TrainableModel: there is no option 'nonsense'"):
        offbook.TrainableModel("a", base_model="tiny", nonsense=1)
    with pytest.raises(ConfigError, match="base_model: name a base"):
        offbook.TrainableModel("a")


@pytest.mark.parametrize(
    ("kind", "why", "advice"),
    [
        ("equal_rewards", "all rewards of each group are equal", "Look at a group. If its answers are all alike"),
        ("no_advantage", "the advantage is 0 for all 4 tokens", "Look for calls that are never trained"),
        ("zero_gradient", "the gradient is exactly zero", "Let the policy choose"),
    ],
)
async def test_a_step_that_is_not_applied_is_logged_with_its_reason_once_a_call(
    caplog: pytest.LogCaptureFixture, kind: str, why: str, advice: str
) -> None:
    outcome = {"model": "agent", "step": 3, "applied": False, "reason": "no_signal", "no_signal": kind, "why": why}
    warned = {"kind": "warning", "message": "of the learner"}
    reply = Reply(events=(warned, {"kind": "result", "result": outcome}))
    with scripted_api(lambda asked: reply if asked.path == "/api/train" else None) as api:
        await model_at(api.url).train([offbook.TrajectoryGroup([rollout()])])
        await model_at(api.url).train([offbook.TrajectoryGroup([rollout()])])
    [first, step, *again] = [record.getMessage() for record in caplog.records if record.name == "offbook"]
    assert (first, again) == ("of the learner", [first, step])
    assert step.startswith(f"no step of 'agent' was applied, it stays at step 3: {why}. {advice}")


@pytest.mark.parametrize("wrap", [list, iter, offbook.TrajectoryGroup])
async def test_log_reads_one_shot_iterables_and_single_groups(wrap: Any) -> None:
    with scripted_api(lambda asked: Reply(json=None) if asked.path.endswith("/log") else None) as api:
        await model_at(api.url).log(wrap([rollout("call-1", 0.5)]), split="val", step=1)
        [logged] = api.bodies("/api/models/agent/log")
    assert (logged["metrics"]["val/reward"], len(logged["trajectory_ids"])) == (0.5, 1)


@pytest.mark.parametrize("wrong", ["rollouts.jsonl", {"a": 1}, rollout()], ids=["str", "dict", "rollout"])
async def test_log_refuses_what_is_no_collection(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="trajectories: a list of rollouts is needed, got"):
        await model_at(NOBODY).log(wrong)
