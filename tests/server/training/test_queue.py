"""Training over HTTP: models, train requests, checkpoints, with the real sampler and learner on the bundled policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.servers import RunningServer, events, record, train_body, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("training") / "dir") as running:
        yield running


@pytest.fixture(scope="module")
def trained(server: RunningServer) -> dict[str, Any]:
    """The result of the first step of `default`."""
    ids = server.rollouts(4, "first")
    return server.train("first-step", [ids])[-1]["result"]


def register(server: RunningServer, name: str, **fields: Any) -> httpx.Response:
    return server.http.post("/api/models", json={"name": name, "base_model": "tiny"} | fields)


def refused(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def asked(server: RunningServer, body: dict[str, Any]) -> httpx.Response:
    return server.http.post("/api/train", json=body)


# ---- models


def test_registering_again_finds_the_model(server: RunningServer) -> None:
    first = register(server, "again", lora={"r": 4})
    assert first.json()["step"] == 0 and first.json()["lora"]["r"] == 4
    assert register(server, "again").json() == first.json()
    facts = json.loads((server.folder / "default/models/again/model.json").read_text())
    assert facts["name"] == "again" and facts["base_model"] == "tiny"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"base_model": "other/base"}, "base_model"),
        ({"project": "elsewhere"}, "project"),
    ],
)
def test_another_base_or_project_under_the_same_name_is_a_conflict(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    register(server, "fixed", lora={"r": 4})
    assert refused(register(server, "fixed", **fields), 409)["param"] == param


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["q_proj", "v_prj"], "'v_prj' matches no linear layer of the base; did you mean 'v_proj'?"),
        (["embed_tokens"], "'embed_tokens' matches no linear layer"),
        ("layers.q_proj", "the regular expression 'layers.q_proj' matches no linear layer"),
        ("*proj", "'*proj' is no regular expression"),
    ],
)
def test_target_modules_that_match_no_layer_are_refused_at_registration(
    server: RunningServer, wrong: str | list[str], message: str
) -> None:
    error = refused(register(server, "mistyped", lora={"target_modules": wrong}), 400)
    assert message in error["message"] and error["param"] == "lora.target_modules"
    for right in (["q_proj", "layers.0.mlp.up_proj"], r".*\.q_proj"):
        assert register(server, "typed", lora={"target_modules": right}).json()["name"] == "typed"


def test_the_lora_is_fixed_by_the_first_step(server: RunningServer, trained: dict[str, Any]) -> None:
    register(server, "mended", lora={"r": 4, "target_modules": ["k_proj"]})
    again = register(server, "mended", lora={"r": 4, "target_modules": ["q_proj"]})
    assert again.json()["lora"]["target_modules"] == ["q_proj"]
    facts = json.loads((server.folder / "default/models/mended/model.json").read_text())
    assert facts["lora"]["target_modules"] == ["q_proj"]
    assert refused(register(server, "default", lora={"r": 32}), 409)["param"] == "lora"


def test_a_users_json_and_metrics_are_kept_with_the_model(server: RunningServer) -> None:
    register(server, "notes")
    assert server.http.get("/api/models/notes/state").json() == {"value": {}}
    server.http.put("/api/models/notes/state", json={"value": {"epoch": 3}})
    assert server.http.get("/api/models/notes/state").json() == {"value": {"epoch": 3}}
    server.http.post("/api/models/notes/log", json={"split": "val", "metrics": {"accuracy": 0.5}})
    assert server.http.get("/api/models/notes/log").json()[0]["metrics"] == {"accuracy": 0.5}
    refused(server.http.get("/api/models/nobody/state"), 404)


def test_a_model_that_is_only_compared_with_has_metrics_too(server: RunningServer) -> None:
    server.http.post("/api/models/gpt-4.1/log", json={"split": "val", "metrics": {"accuracy": 0.7}})
    assert server.http.get("/api/models/gpt-4.1/log").json()[0]["metrics"] == {"accuracy": 0.7}
    refused(server.http.post("/api/models/.hidden/log", json={"metrics": {}}), 400)


# ---- train requests


def test_a_step_is_applied_and_its_lora_answers_the_next_call(server: RunningServer, trained: dict[str, Any]) -> None:
    assert trained["applied"] and trained["step"] == 1 and trained["reason"] == "trained"
    assert trained["metrics"]["trajectories/trained"] == 4
    state = server.http.get("/api/models/default").json()
    assert state["step"] == 1 and state["checkpoint"] == trained["checkpoint"]
    call = server.chat(trajectory="after", logprobs=True, temperature=0.0).json()["choices"][0]
    assert call["offbook"]["step"] == 1
    old = server.chat(model="default@0", trajectory="after", logprobs=True, temperature=0.0).json()["choices"][0]
    assert old["offbook"]["step"] == 0
    assert old["logprobs"] != call["logprobs"]
    assert {"default", "default@0", "default@1"} <= {
        card["id"] for card in server.http.get("/v1/models").json()["data"]
    }
    assert not (server.folder / "jobs" / "first-step").exists()


def test_the_request_sent_again_returns_the_stored_result(server: RunningServer, trained: dict[str, Any]) -> None:
    again = server.train("first-step", [[f"first-{index}" for index in range(4)]])
    assert [event["kind"] for event in again] == ["result"]
    assert again[0]["result"] == trained
    assert server.http.get("/api/train/first-step").json()["state"] == "done"


def test_the_same_id_with_another_body_is_a_conflict(server: RunningServer, trained: dict[str, Any]) -> None:
    ids = [f"first-{index}" for index in range(4)]
    error = refused(asked(server, train_body("first-step", [ids], learning_rate=0.5)), 409)
    assert error["code"] == "id_reused" and "first-step" in error["message"]


def test_two_clients_with_the_same_request_share_one_step(server: RunningServer) -> None:
    register(server, "shared")
    ids = server.rollouts(2, "shared", model="shared")
    body = train_body("shared-step", [ids], model="shared")
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda _: list(events(server.http, body)), range(3)))
    assert [answer[-1]["result"]["step"] for answer in answers] == [1, 1, 1]
    assert server.http.get("/api/models/shared").json()["step"] == 1


def test_a_listener_that_leaves_does_not_stop_the_step(server: RunningServer) -> None:
    register(server, "left")
    ids = server.rollouts(2, "left", model="left")
    body = train_body("left-step", [ids], model="left")
    with server.http.stream("POST", "/api/train", json=body) as answer:
        assert answer.status_code == 200
    done = until(lambda: _ended(server, "left-step"), "the step has ended", 120)
    assert done["state"] == "done" and done["result"]["step"] == 1


def _ended(server: RunningServer, request_id: str) -> dict[str, Any] | None:
    status = server.http.get(f"/api/train/{request_id}").json()
    return status if status["state"] not in ("queued", "running") else None


def test_equal_rewards_change_nothing_and_say_so(server: RunningServer) -> None:
    register(server, "flat")
    ids = server.rollouts(3, "flat", rewards=[1.0, 1.0, 1.0], model="flat")
    body = train_body("flat-model-step", [ids], model="flat")
    result = list(events(server.http, body))[-1]["result"]
    assert (result["applied"], result["reason"], result["step"]) == (False, "no_signal", 0)
    assert server.http.get("/api/models/flat/checkpoints").json() == []


def test_a_gradient_of_zero_changes_nothing_and_the_request_sent_again_says_the_same(server: RunningServer) -> None:
    """Real rollouts with one token to choose from, and a reward that differs all the same."""
    register(server, "certain")
    ids = server.rollouts(3, "certain", rewards=[0.0, 1.0, 1.0], model="certain", top_k=1)
    first, again = (server.train("certain-step", [ids], model="certain")[-1]["result"] for _ in range(2))
    assert (first["applied"], first["reason"], first["no_signal"]) == (False, "no_signal", "zero_gradient")
    assert "top-k" in first["why"] and first["step"] == 0
    assert again == first
    assert server.http.get("/api/models/certain/checkpoints").json() == []


def test_a_group_of_one_is_dropped_and_the_error_says_why(server: RunningServer) -> None:
    ids = server.rollouts(1, "alone", rewards=[1.0])
    last = server.train("alone-step", [ids])[-1]
    assert last["kind"] == "error"
    assert last["error"]["code"] == "no_scored_groups"
    status = server.http.get("/api/train/alone-step").json()
    assert status["state"] == "failed" and "jobs/alone-step" in status["error"]
    assert (server.folder / "jobs" / "alone-step" / "job.json").is_file()


def test_trajectories_that_were_never_finished_are_named(server: RunningServer) -> None:
    error = refused(asked(server, train_body("unknown", [["nobody-1", "nobody-2"]])), 400)
    assert error["code"] == "unknown_trajectory" and "'nobody-1', 'nobody-2'" in error["message"]
    refused(server.http.get("/api/train/unknown"), 404)


def test_trajectories_without_calls_are_named_with_what_to_do(server: RunningServer) -> None:
    server.finish([record("bare-1", 1.0), record("bare-2", 0.0)])
    error = refused(asked(server, train_body("bare", [["bare-1", "bare-2"]])), 400)
    assert error["code"] == "no_calls" and "'bare-1', 'bare-2'" in error["message"]
    assert "x-offbook-trajectory" in error["message"]


def test_calls_to_another_model_do_not_train_this_one(server: RunningServer) -> None:
    register(server, "mine")
    ids = server.rollouts(2, "theirs", model="default")
    error = refused(asked(server, train_body("theirs", [ids], model="mine")), 400)
    assert "default" in error["message"] and "'mine'" in error["message"]


def test_weighted_and_excluded_calls_are_counted_and_a_step_that_excludes_all_is_refused(server: RunningServer) -> None:
    register(server, "weighing", lora={"r": 4})
    ids = [f"weighed-{i}" for i in range(2)]
    calls = {
        name: [
            server.chat("Hello", name, model="weighing", temperature=1.0, seed=at).headers["x-offbook-call"]
            for at in range(3)
        ]
        for name in ids
    }

    def finish(weights: tuple[float, float, float]) -> None:
        server.finish(
            [
                record(
                    name,
                    float(at),
                    model="weighing",
                    weights=dict(zip(calls[name], weights, strict=True)),
                    unused=calls[name][:1],
                )
                for at, name in enumerate(ids)
            ]
        )

    finish((0.0, 0.5, 1.0))
    result = list(events(server.http, train_body("weighed", [ids], "weighing")))[-1]["result"]
    names = ("trained", "excluded", "weighted", "unused", "not_trained")
    assert [result["metrics"][f"calls/{name}"] for name in names] == [4, 2, 2, 2, 0]
    finish((0.0, 0.0, 0.0))
    error = refused(asked(server, train_body("all-excluded", [ids], "weighing")), 400)
    assert "train_on= excluded every call" in error["message"]


def test_a_trajectory_that_comes_twice_and_an_empty_group_are_refused(server: RunningServer) -> None:
    assert "'t'" in refused(asked(server, train_body("twice", [["t", "u"], ["t"]])), 400)["message"]
    assert "Group 1" in refused(asked(server, train_body("empty", [["t"], []])), 400)["message"]


def test_an_unknown_model_cannot_be_trained(server: RunningServer) -> None:
    assert "default" in refused(asked(server, train_body("x", [["t"]], model="nobody")), 404)["message"]


# ---- checkpoints


def test_a_fork_starts_as_a_copy_and_goes_its_own_way(server: RunningServer, trained: dict[str, Any]) -> None:
    state = server.http.post("/api/models/default/fork", json={"name": "branch"}).json()
    assert state["step"] == 1 and state["checkpoint"] != trained["checkpoint"]
    weights = "adapter_model.safetensors"
    assert (Path(state["checkpoint"]) / weights).read_bytes() == (Path(trained["checkpoint"]) / weights).read_bytes()
    refused(server.http.post("/api/models/default/fork", json={"name": "branch"}), 409)
    refused(server.http.post("/api/models/default/fork", json={"name": "other", "from_step": 9}), 404)
    ids = server.rollouts(2, "branch", model="branch")
    result = list(events(server.http, train_body("branch-step", [ids], model="branch")))[-1]["result"]
    assert result["step"] == 2
    assert server.http.get("/api/models/default").json()["step"] == 1


def test_an_old_checkpoint_is_deleted_and_the_newest_never(server: RunningServer, trained: dict[str, Any]) -> None:
    server.http.post("/api/models/default/fork", json={"name": "pruned"})
    ids = server.rollouts(2, "pruned", model="pruned@1")
    list(events(server.http, train_body("pruned-step", [ids], model="pruned")))
    steps = server.http.get("/api/models/pruned/checkpoints").json()
    assert [each["step"] for each in steps] == [1, 2]
    assert "newest" in refused(server.http.delete("/api/models/pruned/checkpoints/2"), 409)["message"]
    assert server.http.delete("/api/models/pruned/checkpoints/1").json() == {}
    assert not Path(steps[0]["path"]).exists()
    assert "it has 0, 2" in refused(server.chat(model="pruned@1"), 404)["message"]
    assert server.chat(model="pruned").status_code == 200
    refused(server.http.delete("/api/models/pruned/checkpoints/1"), 404)


def test_an_exported_adapter_names_the_base_that_it_needs(
    server: RunningServer, trained: dict[str, Any], tmp_path: Path
) -> None:
    url = "/api/models/default/checkpoints/1/export"
    made = server.http.post(url, json={"output": str(tmp_path / "lora")}).json()
    assert made == {"path": str(tmp_path / "lora"), "format": "peft", "step": 1, "note": "", "adapter_kept": None}
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert (tmp_path / "lora").stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "lora").iterdir()} == {0o644}
    assert sorted(path.name for path in (tmp_path / "lora").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert "exists already" in refused(server.http.post(url, json={"output": str(tmp_path / "lora")}), 409)["message"]
    assert "absolute" in refused(server.http.post(url, json={"output": "lora"}), 400)["message"]


def test_a_merged_export_is_a_whole_model(server: RunningServer, trained: dict[str, Any], tmp_path: Path) -> None:
    url = "/api/models/default/checkpoints/1/export"
    made = server.http.post(url, json={"output": str(tmp_path / "merged"), "format": "merged"})
    assert made.status_code == 200, made.text
    names = {path.name for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
