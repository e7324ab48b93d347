"""The real server over a function, and over exact tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, InternalServerError, OpenAI

import offbook
from offbook.base.errors import OffbookError
from offbook.testing import Action, ScriptedServer, scripted_server
from offbook.testing.server import server_over
from tests.fakes.scripted_sampler import ScriptedChoice, ScriptedCompletion, scripted_sampler

HI: list[Any] = [{"role": "user", "content": "hi"}]


def ask(server: ScriptedServer, trajectory: str) -> str | None:
    with OpenAI(base_url=f"{server.url}/t/{trajectory}/v1", api_key="unused", max_retries=0) as openai:
        return openai.chat.completions.create(model="default", messages=HI).choices[0].message.content


def test_a_functions_answers_are_recorded_with_a_token_per_word_and_one_for_the_end() -> None:
    with scripted_server(lambda request: Action("on shelf seven")) as server:
        assert ask(server, "one") == "on shelf seven"
        [call] = server.calls("one")
        assert server.calls("two") == ()
    [output] = call.outputs
    assert len(output.token_ids) == len(output.logprobs) == 4
    assert set(output.logprobs) == {-0.25}
    assert [request["messages"] for request in server.sampler.received] == [HI]


def test_the_records_are_kept_in_a_folder_that_is_named_and_gone_from_one_that_is_not(tmp_path: Path) -> None:
    with scripted_server(lambda request: Action("yes"), tmp_path) as server:
        ask(server, "kept")
    assert (tmp_path / "records.db").stat().st_size > 0
    with scripted_server(lambda request: Action("yes"), tmp_path) as server:
        assert len(server.calls("kept")) == 1
    with scripted_server(lambda request: Action("yes")) as server:
        assert server.calls("kept") == ()


def test_a_refusal_goes_before_the_policy_once() -> None:
    with scripted_server(lambda request: Action("yes")) as server:
        server.sampler.refusals.append((400, "too long"))
        with pytest.raises(Exception, match="too long"):
            ask(server, "one")
        assert ask(server, "one") == "yes"


def test_what_the_policy_raises_is_an_error_of_the_call_and_is_raised_when_the_block_ends() -> None:
    def policy(request: Any) -> Action:
        raise LookupError("no such box")

    with (
        pytest.raises(LookupError, match="no such box"),
        scripted_server(policy) as server,
        pytest.raises(InternalServerError, match="no such box"),
    ):
        ask(server, "one")


def test_training_is_refused_because_there_is_no_learner() -> None:
    with scripted_server(lambda request: Action("yes")) as server:
        model = offbook.TrainableModel("agent", base_model="tiny", backend=offbook.RemoteBackend(server.url))

        async def rollout(model: offbook.TrainableModel, scenario: str) -> offbook.Trajectory:
            openai = model.openai_client()
            answer = await openai.chat.completions.create(model=model.name, messages=HI)
            return offbook.Trajectory(
                messages_and_choices=[*HI, answer.choices[0]], reward=float(len(server.sampler.received))
            )

        trainer = offbook.Trainer(model, rollout, ["a"])
        with pytest.raises(OffbookError, match="--inference-only"):
            trainer.train(1)


async def test_exact_tokens_and_logprobs_are_recorded() -> None:
    choice = ScriptedChoice(pieces=("4", "2"), token_ids=((8, 9), (10,)), logprobs=((-0.5, -1.5), (-2.0,)))
    async with (
        scripted_sampler() as sampler,
        server_over(sampler.url) as url,
        AsyncOpenAI(base_url=f"{url}/t/exact/v1", api_key="unused") as openai,
        httpx.AsyncClient(base_url=url, trust_env=False) as http,
    ):
        sampler.completions.append(ScriptedCompletion((choice,), prompt_ids=(5, 6, 7)))
        completion = await openai.chat.completions.create(model="default", messages=HI)
        [call] = (await http.get("/api/trajectories/exact")).json()["calls"]
    assert completion.choices[0].message.content == "42"
    assert call["prompt_ids"] == [5, 6, 7]
    [output] = call["outputs"]
    assert (output["token_ids"], output["logprobs"]) == ([8, 9, 10], [-0.5, -1.5, -2.0])
