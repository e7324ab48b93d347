"""Models on a real server: the whole loop, from several event loops, and what is kept with a model."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

import offbook
from offbook.base.errors import CaptureError, ConfigError, ServerError
from offbook.client.rollouts.capture import at_temperature

ASK: list[Any] = [{"role": "user", "content": "say hello"}]


def ask(number: float) -> list[Any]:
    """A question of each rollout's own: equal answers to an equal one, with other rewards, would cancel out."""
    return [{"role": "user", "content": f"say hello {number}"}]


def model_of(backend: offbook.LocalBackend, name: str) -> offbook.TrainableModel:
    return offbook.TrainableModel(name=name, project="tests", base_model="tiny", backend=backend)


async def rollout(model: offbook.Model, reward: float) -> offbook.Trajectory:
    client = model.openai_client()
    traj = offbook.Trajectory(messages_and_choices=ask(reward), reward=0.0)
    completion = await client.chat.completions.create(model=model.name, messages=traj.messages(), max_tokens=6)
    traj.messages_and_choices.append(completion.choices[0])
    traj.reward = reward
    return traj


async def gathered(model: offbook.Model, size: int = 2) -> list[offbook.TrajectoryGroup]:
    return await offbook.gather_trajectory_groups([offbook.TrajectoryGroup(rollout(model, i % 2) for i in range(size))])


@pytest.mark.slow("whole trainings")
async def test_the_snippet_of_the_design_runs_as_written(local_backend: offbook.LocalBackend) -> None:
    model = offbook.TrainableModel(name="agent-001", project="my-agent", base_model="tiny")
    await model.register(local_backend)
    scenarios = [offbook.Scenario(prompt="tell me a story"), offbook.Scenario(prompt="what is the weather in Oslo?")]
    rewards = iter([0.0, 1.0] * 4)

    async def rollout(model: offbook.TrainableModel, scenario: offbook.Scenario) -> offbook.Trajectory:
        client = model.openai_client()
        traj = offbook.Trajectory(messages_and_choices=[{"role": "user", "content": scenario.prompt}], reward=0.0)
        completion = await client.chat.completions.create(model=model.name, messages=traj.messages())
        traj.messages_and_choices.append(completion.choices[0])
        traj.reward = next(rewards)
        return traj

    groups = await offbook.gather_trajectory_groups(
        offbook.TrajectoryGroup(rollout(model, s) for _ in range(4)) for s in scenarios
    )
    result = await model.train(groups, config=offbook.TrainConfig(learning_rate=1e-5))
    step = await model.get_step()
    assert (result.step, result.applied, step) == (1, True, 1)
    assert result.metrics["trajectories/trained"] == 8 and result.metrics["calls/rendered_share"] == 0
    assert result.checkpoint is not None and (Path(result.checkpoint) / "adapter_model.safetensors").exists()


async def test_registering_twice_finds_the_same_model_and_another_base_is_an_error(
    local_backend: offbook.LocalBackend,
) -> None:
    for _ in range(2):
        await model_of(local_backend, "twice").register()
    api = await local_backend.connect("tiny")
    assert [state.name for state in await api.models()].count("twice") == 1
    other = offbook.TrainableModel("twice", project="tests", base_model="some/other-model", backend=local_backend)
    with pytest.raises(ServerError, match="other-model") as caught:
        await other.register()
    assert caught.value.status in (400, 409)


def test_a_model_made_at_module_level_is_used_from_one_loop_after_another(local_backend: offbook.LocalBackend) -> None:
    model = model_of(local_backend, "loops")
    client = model.openai_client()
    asyncio.run(model.register())

    async def ask() -> str:
        completion = await client.chat.completions.create(model=model.name, messages=ASK, max_tokens=4)
        return completion.choices[0].finish_reason

    assert {asyncio.run(ask()) for _ in range(2)} <= {"stop", "length"}
    groups = asyncio.run(gathered(model))
    result = asyncio.run(model.train(groups))
    assert (result.step, asyncio.run(model.get_step())) == (1, 1)


async def test_two_loops_at_once_share_a_model(local_backend: offbook.LocalBackend) -> None:
    model = model_of(local_backend, "loops-at-once")
    answers: list[offbook.Trajectory] = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(rollout(model, 1))))
    thread.start()
    answers.append(await rollout(model, 0))
    await asyncio.to_thread(thread.join, 120)
    assert len({trajectory.call_refs()[0].call_id for trajectory in answers}) == 2


async def test_the_first_call_registers_and_the_name_means_the_newest_step(local_backend: offbook.LocalBackend) -> None:
    model = model_of(local_backend, "first-use")
    groups = await gathered(model)
    assert await model.get_step() == 0
    again = offbook.TrainConfig(learning_rate=1e-3)
    result = await local_backend.train(model, groups, learning_rate=1e-3, request_id="only-once")
    assert await local_backend.train(model, groups, again, request_id="only-once") == result
    assert await model.get_step() == 1
    client = model.openai_client()
    for name, step in ((model.name, 1), (model.inference_name(1), 1), (model.get_inference_name(0), 0)):
        answer = await client.chat.completions.create(model=name, messages=ASK, max_tokens=2)
        assert (answer.choices[0].model_extra or {})["offbook"]["step"] == step


async def test_a_loaded_rollout_can_be_trained_again(local_backend: offbook.LocalBackend) -> None:
    model = model_of(local_backend, "saved")
    text = [group.model_dump_json() for group in await gathered(model)]
    result = await model.train([offbook.TrajectoryGroup.model_validate_json(saved) for saved in text])
    assert result.metrics["calls/rendered_share"] == 0 and result.metrics["trajectories/trained"] == 2


async def test_a_choice_whose_call_the_server_does_not_know_is_an_error_that_names_it(
    local_backend: offbook.LocalBackend,
) -> None:
    model = model_of(local_backend, "unknown-call")
    [group] = await gathered(model)
    choice = group.trajectories[0].messages_and_choices[-1]
    choice.offbook["call_id"] = "call-of-nobody"  # type: ignore[union-attr]
    with pytest.raises(ServerError, match="call-of-nobody") as caught:
        await model.train([group])
    assert caught.value.status in (400, 404)


async def test_a_users_own_client_on_the_models_url_is_recorded_and_trained(
    local_backend: offbook.LocalBackend,
) -> None:
    model = model_of(local_backend, "own-client")
    with pytest.raises(ConfigError, match="not registered yet"):
        model.inference_base_url  # noqa: B018
    await model.register()
    async with AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key) as client:
        group = offbook.TrajectoryGroup()
        for reward in (0.0, 1.0):
            messages = ask(reward)
            answer = await client.chat.completions.create(model=model.name, messages=messages, max_tokens=4)
            group.trajectories.append(
                offbook.Trajectory(messages_and_choices=[*messages, answer.choices[0]], reward=reward)
            )
    result = await model.train([group])
    assert result.metrics["calls/rendered_share"] == 0 and result.metrics["calls/trained"] >= 1


async def test_litellm_parameters_name_the_endpoint_and_ask_for_a_record(local_backend: offbook.LocalBackend) -> None:
    model = model_of(local_backend, "litellm")
    await model.register()
    params = model.litellm_completion_params(3)
    assert params["model"] == "hosted_vllm/litellm@3"
    assert params["base_url"].endswith("/v1") and params["num_retries"] == 0
    assert params["extra_headers"] == {"x-offbook-record": "1"} and "temperature" not in params
    with at_temperature(0.0):
        assert model.litellm_completion_params()["temperature"] == 0.0


async def test_calls_made_inside_a_captured_coroutine_become_its_trajectory(
    local_backend: offbook.LocalBackend,
) -> None:
    model = model_of(local_backend, "captured")

    async def agent(reward: float) -> None:
        offbook.auto_trajectory(required=True).reward = reward
        client = model.openai_client()
        first = await client.chat.completions.create(model=model.name, messages=ASK, max_tokens=4)
        answer = first.choices[0].message.model_dump(exclude_none=True)
        follow = [*ASK, answer, {"role": "user", "content": "and now?"}]
        await client.chat.completions.create(model=model.name, messages=follow, max_tokens=4)
        side: list[Any] = [{"role": "user", "content": "a title, please"}]
        await client.chat.completions.create(model=model.name, messages=side, max_tokens=4)

    assert offbook.auto_trajectory() is None and offbook.current_trajectory() is None
    group = await offbook.gather_trajectory_groups(
        [offbook.TrajectoryGroup(offbook.capture_auto_trajectory(agent(reward)) for reward in (0.0, 1.0))]
    )
    for trajectory in group[0]:
        assert [message["role"] for message in trajectory.messages()] == ["user", "assistant", "user", "assistant"]
        assert [len(history.messages_and_choices) for history in trajectory.additional_histories] == [2]
    result = await model.train(group)
    assert result.metrics["calls/total"] == 6


async def test_calls_that_the_server_refuses_leave_a_captured_rollout_whole(
    local_backend: offbook.LocalBackend,
) -> None:
    model = model_of(local_backend, "refused")

    async def agent(names: list[str], most: list[int]) -> None:
        offbook.auto_trajectory(required=True).reward = 1.0
        for name, tokens in zip(names, most, strict=True):
            with suppress(BadRequestError, NotFoundError):
                await model.openai_client().chat.completions.create(model=name, messages=ASK, max_tokens=tokens)

    await model.register()
    one = await offbook.capture_auto_trajectory(agent([model.name, model.name], [100_000, 4]))
    assert [message["role"] for message in one.messages()] == ["user", "assistant"]
    none = await offbook.capture_auto_trajectory(agent(["nobody"], [4]))
    assert none.messages() == []


async def test_outside_a_capture_a_required_trajectory_is_an_error() -> None:
    with pytest.raises(CaptureError, match="capture_auto_trajectory"):
        offbook.auto_trajectory(required=True)


async def test_a_forced_temperature_holds_for_every_call(local_backend: offbook.LocalBackend) -> None:
    model = model_of(local_backend, "greedy")
    with at_temperature(0.0):
        trajectory = await offbook.capture_auto_trajectory(rollout(model, 1))
    api = await local_backend.connect()
    [call] = (await api.trajectory(trajectory.id)).calls
    assert call.sampling.temperature == 0.0


async def test_logged_metrics_decide_which_checkpoints_stay(local_backend: offbook.LocalBackend) -> None:
    model = model_of(local_backend, "kept")
    for reward in (0.2, 0.9, 0.1, 0.3):
        result = await model.train(await gathered(model))
        scored = offbook.Trajectory(messages_and_choices=ASK, reward=reward, metrics={"won": reward > 0.5})
        crashed = offbook.TrajectoryGroup([ValueError("the tool is away")])
        await model.log([scored, crashed], split="val", metrics={"speed": 3}, step=result.step)  # type: ignore[arg-type]  # both kinds
    api = await local_backend.connect()
    assert (await api.logs("kept"))[1].metrics == {
        "val/reward": 0.9,
        "val/won": 1.0,
        "val/exception_rate": 0.5,
        "val/speed": 3.0,
    }
    assert await model.delete_checkpoints() == [1, 3]
    assert [state.step for state in await model.checkpoints()] == [2, 4]
    client = model.openai_client()
    with pytest.raises(NotFoundError, match="has no step 1; it has 0, 2, 4"):
        await client.chat.completions.create(model="kept@1", messages=ASK, max_tokens=2)
    with pytest.raises(ConfigError, match=r"no checkpoint has 'val/nothing'; the logged metrics are .*val/speed"):
        await model.delete_checkpoints(best_checkpoint_metric="val/nothing")
    assert await model.delete_checkpoints("val/won") == []


async def test_the_best_step_by_its_own_rollouts_stays_when_the_step_after_it_is_gone(
    local_backend: offbook.LocalBackend,
) -> None:
    model = model_of(local_backend, "own-rollouts")
    kept: list[list[int]] = []
    for best in (0.1, 0.2, 0.9, 0.3, 0.1, 0.4):  # the step's rollouts are those of the step before
        group = (await gathered(model))[0]
        for trajectory, reward in zip(group, (0.0, 2 * best), strict=True):
            trajectory.reward = reward
        await model.train([group])
        await model.delete_checkpoints("train/reward")
        kept.append([state.step for state in await model.checkpoints()])
    assert kept == [[1], [1, 2], [2, 3], [2, 4], [2, 5], [2, 6]]


async def test_a_json_of_the_users_own_is_kept_with_the_model(local_backend: offbook.LocalBackend) -> None:
    model = model_of(local_backend, "stateful")
    assert await model.read_state() == {}
    await model.overwrite_state({"epoch": 1, "seen": ["a"]})
    assert await model.merge_state({"epoch": 2}) == {"epoch": 2, "seen": ["a"]}
    assert await model_of(local_backend, "stateful").read_state() == {"epoch": 2, "seen": ["a"]}


async def test_a_model_is_forked_and_exported(local_backend: offbook.LocalBackend, tmp_path: Path) -> None:
    model = model_of(local_backend, "parent")
    await model.train(await gathered(model))
    child = await model.fork("child", from_step=1)
    assert (child.name, await child.get_step()) == ("child", 1)
    folder = Path(await child.export(tmp_path / "lora"))
    assert folder == tmp_path / "lora" and (folder / "adapter_config.json").exists()
    with pytest.raises(ConfigError, match="format: 'gguf' must be"):
        await child.export(tmp_path / "other", format="gguf")


def test_a_name_that_cannot_be_a_folder_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="name: 'a b/c' must be letters"):
        offbook.TrainableModel(name="a b/c", base_model="tiny")


async def test_a_server_that_cannot_be_reached_says_so_through_the_openai_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offbook.client.connection.http.FIRST_SECONDS", 0.1)
    model = offbook.TrainableModel("lost", base_model="tiny", backend=offbook.RemoteBackend("http://127.0.0.1:9"))
    with pytest.raises(Exception, match=r"no answer from the server at http://127.0.0.1:9"):
        await model.openai_client().chat.completions.create(model="lost", messages=ASK)


def test_a_comparison_model_is_any_endpoint() -> None:
    model = offbook.Model(
        "gpt", config={"mine": 1}, inference_api_key="k", inference_base_url="http://x/v1", inference_model_name="m-4"
    )
    client = model.openai_client()
    assert (str(client.base_url), client.api_key, model.inference_name()) == ("http://x/v1/", "k", "m-4")
    assert model.litellm_completion_params() == {"model": "openai/m-4", "base_url": "http://x/v1", "api_key": "k"}
    with pytest.raises(ConfigError, match="has no steps"):
        model.inference_name(1)
