"""Capture against a scripted endpoint: unchanged apps are redirected, and only while a capture is active."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from offbook import Trajectory
from offbook.testing import LlmReply, LlmRequest, ScriptedLlm, calls_tool, says, scripted_llm
from offbook_langgraph import ChatOffbook
from offbook_langgraph.calls.active_capture import ActiveCapture, CallRoute, activated
from offbook_langgraph.calls.langchain_patches import install
from offbook_langgraph.calls.origins import Selection, as_predicate
from offbook_langgraph.calls.provider_formats import to_openai


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def script(request: LlmRequest) -> LlmReply:
    last = request.messages[-1]
    return calls_tool("add", {"a": 1, "b": 2}) if last["role"] == "user" else says(f"it is {last['content']}")


@pytest.fixture
def server() -> Generator[ScriptedLlm]:
    with scripted_llm(script) as running:
        yield running


@pytest.fixture
def app() -> Any:
    """An app as its author wrote it; its own model would fail."""
    return create_agent(ChatOpenAI(model="gpt-4.1-mini", api_key=SecretStr("unused"), max_tokens=33), [add])  # type: ignore[call-arg]  # an alias that pydantic accepts


def capture_to(server: ScriptedLlm, trajectory: str, select: Selection | None = None) -> Any:
    install()
    target = ChatOffbook(model="agent", base_url=server.url, api_key=SecretStr("k"))
    return activated(ActiveCapture((CallRoute(target, as_predicate(select, "select")),), Trajectory(id=trajectory)))


QUESTION = {"messages": [("user", "1 + 2?")]}


def test_an_unchanged_agent_is_redirected_when_invoked(server: ScriptedLlm, app: Any) -> None:
    with capture_to(server, "t1"):
        state = app.invoke(QUESTION)
    assert state["messages"][-1].text == "it is 3"
    first = server.requests[0]
    assert first.body["model"] == "agent"
    assert first.body["tools"][0]["function"]["name"] == "add"
    assert first.body["max_completion_tokens"] == 33
    assert [request.headers["x-offbook-trajectory"] for request in server.requests] == ["t1", "t1"]
    assert '"node": "model"' in first.headers["x-offbook-origin"]


def test_an_unchanged_agent_is_redirected_when_streamed(server: ScriptedLlm, app: Any) -> None:
    with capture_to(server, "t1"):
        text = "".join(
            chunk.text for chunk, _ in app.stream(QUESTION, stream_mode="messages") if chunk.type == "AIMessageChunk"
        )
    assert text == "it is 3"
    assert len(server.requests) == 2
    assert server.requests[0].body["stream"] is True


async def test_concurrent_rollouts_on_one_graph_stay_apart(server: ScriptedLlm, app: Any) -> None:
    async def rollout(number: int) -> None:
        with capture_to(server, f"t{number}"):
            state = await app.ainvoke({"messages": [("user", f"question {number}")]})
            assert state["messages"][-1].text == "it is 3"

    await asyncio.gather(*(rollout(number) for number in range(20)))
    owners = {
        request.headers["x-offbook-trajectory"]: request.body["messages"][0]["content"] for request in server.requests
    }
    assert owners == {f"t{number}": f"question {number}" for number in range(20)}
    assert len(server.requests) == 40


def test_tool_choice_and_stop_are_passed_on(server: ScriptedLlm) -> None:
    model = ChatOpenAI(model="gpt-4.1-mini", api_key=SecretStr("unused")).bind_tools([add], tool_choice="any")
    with capture_to(server, "t1"):
        model.invoke("hi", stop=["END"])
    assert server.requests[0].body["tool_choice"] == "required"
    assert server.requests[0].body["stop"] == ["END"]


def test_the_apps_temperature_and_seed_are_not_passed_on(server: ScriptedLlm) -> None:
    model = ChatOpenAI(model="gpt-4.1-mini", api_key=SecretStr("unused")).bind(temperature=0.0, seed=3)
    with capture_to(server, "t1"):
        model.invoke("hi")
    assert "seed" not in server.requests[0].body
    assert server.requests[0].body.get("temperature") != 0.0


def test_an_apps_own_chat_offbook_is_captured_and_one_with_a_trajectory_is_left_alone(
    server: ScriptedLlm,
) -> None:
    own = ChatOffbook(model="agent", base_url=f"{server.url}", api_key=SecretStr("unused"))
    with capture_to(server, "t1"):
        own.invoke("hi")
        own.model_copy(update={"trajectory_id": "mine"}).invoke("hi")
    assert [request.headers["x-offbook-trajectory"] for request in server.requests] == ["t1", "mine"]


def test_threads_and_executors_carry_the_capture(server: ScriptedLlm) -> None:
    model = ChatOpenAI(model="gpt-4.1-mini", api_key=SecretStr("unused"))
    with capture_to(server, "t1"), ThreadPoolExecutor(2) as pool:
        pool.submit(model.invoke, "hi").result()
        thread = threading.Thread(target=model.invoke, args=("hi",))
        thread.start()
        thread.join()
    assert [request.headers["x-offbook-trajectory"] for request in server.requests] == ["t1", "t1"]


def test_calls_that_are_not_selected_stay_on_the_apps_own_model(server: ScriptedLlm) -> None:
    with scripted_llm([says("from the original")]) as own:
        titles = ChatOpenAI(model="titles", api_key=SecretStr("unused"), base_url=own.url, tags=["title"])
        with capture_to(server, "t1", select=lambda origin: "title" not in origin.tags):
            assert titles.invoke("hi").text == "from the original"
    assert server.requests == []
    assert "x-offbook-trajectory" not in own.requests[0].headers


def test_without_a_capture_the_app_runs_on_its_own_model() -> None:
    install()
    with scripted_llm([says("mine")]) as own:
        model = ChatOpenAI(model="gpt-4.1-mini", api_key=SecretStr("unused"), base_url=own.url)
        assert model.invoke([HumanMessage("hi")]).text == "mine"
    assert own.requests[0].body["model"] == "gpt-4.1-mini"


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_importing_the_adapter_patches_nothing() -> None:
    code = (
        "import offbook_langgraph, threading\n"
        "from langchain_core.language_models import BaseChatModel\n"
        "print(hasattr(BaseChatModel.generate, '__offbook_original__'), threading.Thread.start.__module__)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert printed.split() == ["False", "threading"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "any"}, "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        ("any", "required"),
        (True, "required"),
        ("add", {"type": "function", "function": {"name": "add"}}),
        ("none", "none"),
    ],
)
def test_tool_choices_of_other_providers_become_openais(given: Any, expected: Any) -> None:
    assert to_openai({"tool_choice": given, "thinking": {}}) == {"tool_choice": expected}


def test_anthropic_tools_become_openais() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tools = to_openai({"tools": [{"name": "add", "description": "Adds.", "input_schema": schema}]})["tools"]
    assert tools == [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}}]
