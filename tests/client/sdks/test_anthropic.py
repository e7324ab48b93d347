"""Clients of Anthropic's API: its SDK, LangChain's chat model and Pydantic AI's, pointed at the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageParam, ToolParam
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage

from offbook.base.types import new_id
from offbook.server.calls.sampled_calls import TrajectoryCalls
from offbook.testing import ScriptedServer

from .rollouts import one_branch, recorded, shown

ORDER = "add(a=1, b=2) and add(a=3, b=4) then add(a=5, b=6)"
ANSWER = "the tools said 3, 7, 11"
ADD: ToolParam = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}


@pytest.fixture
def rollout() -> str:
    """The id of a new trajectory."""
    return new_id("traj")


@pytest.fixture
def client(served: ScriptedServer, rollout: str) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client, at the URL that names the trajectory."""
    with anthropic.Anthropic(base_url=f"{served.url}/t/{rollout}", api_key="unused", max_retries=0) as opened:
        yield opened


def said(client: anthropic.Anthropic, messages: list[MessageParam], *, streamed: bool) -> anthropic.types.Message:
    """An answer of the model, whole or put together from the stream by the SDK."""
    asked: dict[str, Any] = {
        "model": "default",
        "max_tokens": 64,
        "system": "Be brief.",
        "tools": [ADD],
        "messages": messages,
    }
    if not streamed:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        return stream.get_final_message()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_loop_of_anthropics_sdk_calls_tools(
    served: ScriptedServer, client: anthropic.Anthropic, rollout: str, streamed: bool
) -> None:
    messages: list[MessageParam] = [{"role": "user", "content": ORDER}]
    while True:
        answer = said(client, messages, streamed=streamed)
        messages.append({"role": "assistant", "content": answer.content})  # type: ignore[typeddict-item]
        uses = [block for block in answer.content if block.type == "tool_use"]
        if not uses:
            break
        assert answer.stop_reason == "tool_use"
        sums = [(use.id, str(use.input["a"] + use.input["b"])) for use in uses]  # type: ignore[index,call-overload,operator]
        messages.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": c} for i, c in sums]}
        )
    (text,) = answer.content
    assert (text.text, answer.stop_reason) == (ANSWER, "end_turn")  # type: ignore[union-attr]
    calls = recorded(served, rollout, 3)
    assert one_branch(calls)
    assert answer.id == f"msg_{calls[-1].id}"
    assert answer.usage.input_tokens == len(calls[-1].prompt_ids)
    assert answer.usage.output_tokens == len(calls[-1].outputs[0].token_ids)
    shown(served, "anthropic", "Messages", calls)


def test_anthropics_tool_runner_goes_on_without_its_thread(
    served: ScriptedServer, client: anthropic.Anthropic, rollout: str
) -> None:
    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    client.base_url = f"{served.url}/m/default/t/{rollout}"
    runner = client.beta.messages.tool_runner(
        model="claude-sonnet-4-5", max_tokens=64, messages=[{"role": "user", "content": ORDER}], tools=[add]
    )
    (text,) = runner.until_done().content
    assert text.type == "text" and text.text == ANSWER
    assert one_branch(recorded(served, rollout, 3))


def test_an_agent_of_langchain(served: ScriptedServer, rollout: str) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    chat = ChatAnthropic(model="default", base_url=f"{served.url}/t/{rollout}", api_key="unused", max_tokens=64)  # type: ignore[call-arg]
    done = create_agent(chat, [add]).invoke({"messages": [HumanMessage(ORDER)]})
    assert done["messages"][-1].text == ANSWER
    shown(served, "langchain-anthropic", "Messages", recorded(served, rollout, 3))


def test_tokens_are_counted_exactly_and_nothing_is_recorded(
    served: ScriptedServer, client: anthropic.Anthropic, rollout: str
) -> None:
    asked: Any = {
        "model": "default",
        "system": "Be brief.",
        "tools": [ADD],
        "messages": [{"role": "user", "content": "hi"}],
    }
    count = client.messages.count_tokens(**asked).input_tokens
    assert served.calls(rollout) == ()
    client.messages.create(**asked, max_tokens=8)
    (call,) = served.calls(rollout)
    assert count == len(call.prompt_ids)


def test_the_model_of_the_url_answers_whatever_the_client_asks_for(served: ScriptedServer, rollout: str) -> None:
    url = f"{served.url}/m/default/t/{rollout}"
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
        answer = client.messages.create(model="claude-x", max_tokens=8, messages=[{"role": "user", "content": "hi"}])
    assert answer.content[0].text == "heard: hi"  # type: ignore[union-attr]
    (call,) = served.calls(rollout)
    assert call.model == "default"


def test_errors_have_anthropics_form(served: ScriptedServer, client: anthropic.Anthropic) -> None:
    hi: list[MessageParam] = [{"role": "user", "content": "hi"}]
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nobody", max_tokens=8, messages=hi)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="is a tool of Anthropic's own"):
        client.messages.create(
            model="default", max_tokens=8, messages=hi, tools=[{"type": "web_search_20250305", "name": "web_search"}]
        )
    for body, field in (({}, "messages"), ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages.0")):
        refused = httpx.post(f"{served.url}/v1/messages", json={"model": "default", "max_tokens": 8, **body})
        answer = refused.json()
        assert (refused.status_code, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
        assert field in answer["error"]["message"]
    wrong = httpx.get(f"{served.url}/v1/messages")
    assert (wrong.status_code, wrong.json()["type"], wrong.headers["allow"]) == (405, "error", "POST")
    upgrade = httpx.get(f"{served.url}/v1/messages", headers={"connection": "upgrade", "upgrade": "websocket"})
    assert upgrade.status_code == 426


def test_without_restoration_the_loop_parts(
    served: ScriptedServer, client: anthropic.Anthropic, rollout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrajectoryCalls, "restore", lambda *_: None)
    with pytest.raises(AssertionError, match="one_branch"):
        test_a_loop_of_anthropics_sdk_calls_tools(served, client, rollout, streamed=False)
