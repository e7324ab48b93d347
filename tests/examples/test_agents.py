"""The agents of examples/: what each knows and rewards, without a model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionMessage

import offbook
from offbook.testing import LlmReply, LlmRequest, calls_tool, says, scripted_llm
from tests.examples.trainings import EXAMPLES, MEASURED, train_a_step

AGENTS = (
    "supervisor_agent",
    "customer_service",
    "existing_server",
    "observe_and_improve",
)  # with a training of 60 lines


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("OPENAI_API_KEY", "unused")


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize("example", [*AGENTS, "on_the_job"])
def test_an_agent_knows_nothing_of_offbook(example: str) -> None:
    code = f"import sys, {example}.agent; sys.exit(sorted(name for name in sys.modules if name.startswith('offbook')) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("example", [*AGENTS, "auto_rl", "mcp_rl", "langgraph_email_agent"])
def test_a_training_is_60_lines_at_most(example: str) -> None:
    assert len((EXAMPLES / example / "train.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("calls", "state", "score"),
    [
        (["order_state", "cancel_order"], "open", 1.0),
        (["order_state", "hand_over"], "open", 0.0),
        (["order_state", "cancel_order"], "sent", -1.0),
        (["order_state", "hand_over"], "sent", 1.0),
        (["order_state", "order_state"], "sent", 0.0),
        (["cancel_order", "hand_over"], "sent", -1.0),  # handing over makes nothing good
    ],
)
def test_a_customer_is_served_by_the_rule(calls: list[str], state: str, score: float) -> None:
    from customer_service.agent import Shop, serve

    seed = next(seed for seed in range(100) if Shop(seed).state == state)
    left = list(calls)

    async def create(*, messages: list[Any], **_: Any) -> Any:
        said: dict[str, Any] = {"role": "assistant", "content": None}
        if messages[-1]["role"] == "tool" or not left:
            said["content"] = f"It is {messages[-1]['content']}."
        else:
            arguments = json.dumps({"order": Shop(seed).order})
            call = {"id": "1", "type": "function", "function": {"name": left.pop(0), "arguments": arguments}}
            said["tool_calls"] = [call]
        return SimpleNamespace(choices=[SimpleNamespace(message=ChatCompletionMessage.model_validate(said))])

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    assert asyncio.run(serve(client, "", {"shop": seed})) == score


def test_the_planner_hands_over_and_the_worker_reads_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from supervisor_agent.agent import ORDERS, make_agent
    from supervisor_agent.train import reward, scenarios

    asked = next(each for each in scenarios([*ORDERS][:1]) if each["worker"] == "office")

    def reply(request: LlmRequest) -> LlmReply:
        if request.messages[-1]["role"] == "tool":
            return says(str(request.messages[-1]["content"]))
        names = {tool["function"]["name"] for tool in request.body["tools"]}
        [order] = [order for order in ORDERS if order in asked["question"]]
        return calls_tool("ask_office" if "ask_office" in names else "full_price", {"order": order})

    with scripted_llm(reply) as endpoint:
        monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
        state = asyncio.run(make_agent().ainvoke({"messages": [("user", asked["question"])]}))
        assert [len(request.messages) for request in endpoint.requests] == [1, 1, 3]
    assert reward(asked, state) == 1.0
    assert reward(asked | {"answer": "another"}, state) == 0.3
    assert reward(asked | {"worker": "warehouse"}, state) == 0.0


def test_the_teacher_answers_nine_of_ten_visitors(monkeypatch: pytest.MonkeyPatch) -> None:
    from observe_and_improve.agent import make_agent
    from observe_and_improve.teacher import teacher
    from observe_and_improve.visitors import PAINTINGS, scenarios

    with scripted_llm(teacher) as endpoint:
        monkeypatch.setenv("OPENAI_BASE_URL", endpoint.url)
        agent, asked = make_agent(), scenarios([*PAINTINGS][:8])
        said = [agent.invoke({"messages": [("user", each["question"])]})["messages"][-1].text for each in asked]
    right = [each["answer"] == text for each, text in zip(asked, said, strict=True)]
    assert 0.8 < sum(right) / len(right) < 1


def test_the_shops_paid_model_is_right_for_92_of_100_customers() -> None:
    from on_the_job.agent import ORDERS
    from on_the_job.paid import QUESTIONS, paid

    right: list[bool] = []
    for tool, wordings in QUESTIONS.items():
        for question in (words.format(order) for words in wordings for order in ORDERS):
            body = {"messages": [{"role": "user", "content": question}]}
            completion: Any = paid(LlmRequest("/v1/chat/completions", {}, body)).completion
            [call] = completion["choices"][0]["message"]["tool_calls"]
            right.append(call["function"]["name"] == tool)
    assert 0.90 <= sum(right) / len(right) <= 0.94


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_the_shop_goes_back_from_a_model_that_was_not_trained(tmp_path: Path) -> None:
    from on_the_job.paid import paid
    from on_the_job.run import served
    from on_the_job.shop import Shop

    async def story(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            rule = {"share": 0.5, "threads": 20, "margin": 0.2}
            (await http.post("/api/takeover/start", json=rule)).raise_for_status()
        async with aclosing(Shop(url, seed=0)) as shop:
            state = await shop.serve(320, lambda state: state.status != "running")
            assert state.status == "left" and state.decisions[-1].reason == "not shown to be worse by less than 0.2"
            assert 0.0 < shop.rows[0]["small"] < 1.0
            assert (await shop.serve(32)).share == shop.rows[-1]["small"] == 0.0

    with scripted_llm(paid) as provider, served(tmp_path, provider.url, "--inference-only") as url:
        asyncio.run(story(url))


@pytest.mark.slow("whole trainings")
def test_a_step_is_trained_on_a_server_that_runs(local_backend: offbook.LocalBackend, tmp_path: Path) -> None:
    model = offbook.TrainableModel("other", "examples", "tiny", backend=local_backend)
    server = asyncio.run(model.api())
    train_a_step(["existing_server.train"], tmp_path, *MEASURED, "--url", server.url, "--api-key", str(server.key))
    trained = offbook.TrainableModel("mail-room-0", "examples", "tiny", backend=local_backend)
    assert asyncio.run(trained.get_step()) == 1
