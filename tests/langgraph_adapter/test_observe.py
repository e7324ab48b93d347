"""`observe`: what the app's own models were asked and answered, whatever their provider, without redirection."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types.chat.chat_completion import Choice
from pydantic import SecretStr

from offbook import TrainableModel, Trajectory
from offbook.base.redaction import MARK
from offbook.base.types import call_ref
from offbook.testing import LlmReply, LlmRequest, ScriptedServer, calls_tool, says, scripted_llm
from offbook_langgraph import capture, observe

ASKED: Any = {"messages": [("user", "1 + 2?")]}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def script(request: LlmRequest) -> LlmReply:
    last = request.messages[-1]
    return calls_tool("add", {"a": 1, "b": 2}) if last["role"] == "user" else says(f"it is {last['content']}")


def own_agent(url: str) -> Any:
    return create_agent(
        ChatOpenAI(model="gpt-4.1-mini", api_key=SecretStr("unused"), base_url=url), [add], name="adder"
    )


def texts(trajectory: Trajectory) -> list[str]:
    return [f"{message['role']}: {message.get('content') or ''}" for message in trajectory.messages()]


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream", "astream_events"])
async def test_an_agent_is_observed_in_every_way_of_running_it(way: str) -> None:
    with scripted_llm(script) as own:
        app = own_agent(own.url)
        async with observe() as trajectory:
            if way == "invoke":
                app.invoke(ASKED)
            elif way == "ainvoke":
                await app.ainvoke(ASKED)
            elif way == "stream":
                list(app.stream(ASKED, stream_mode="messages"))
            elif way == "astream":
                [item async for item in app.astream(ASKED, stream_mode="messages")]
            else:
                [item async for item in app.astream_events(ASKED, version="v2")]
    assert len(own.requests) == 2
    assert texts(trajectory) == ["user: 1 + 2?", "assistant: ", "tool: 3", "assistant: it is 3"]
    choices = [item for item in trajectory.messages_and_choices if isinstance(item, Choice)]
    called = choices[0].message.tool_calls
    assert called is not None and called[0].type == "function"
    assert (called[0].function.name, json.loads(called[0].function.arguments)) == ("add", {"a": 1, "b": 2})
    assert [call_ref(choice) for choice in choices] == [None, None]  # rendered with the chat template when trained on
    assert trajectory.tools is not None and trajectory.tools[0]["function"]["name"] == "add"
    first = trajectory.metadata["calls"][0]
    facts = {"node": "model", "step": 1, "agent": "adder", "model": "gpt-4.1-mini", "kind": "ChatOpenAI"}
    assert {key: first[key] for key in facts} == facts
    assert trajectory.metrics["calls"] == 2


def test_another_providers_calls_come_in_the_same_shape() -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    class Anthropic(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            last = asked["messages"][-1]["content"]
            done = isinstance(last, list) and last[0]["type"] == "tool_result"
            block = {"type": "text", "text": "it is 3"} if done else {}
            block = block or {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}}
            message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": [block]}
            message |= {
                "stop_reason": "end_turn" if done else "tool_use",
                "usage": {"input_tokens": 1, "output_tokens": 1},
            }
            payload = json.dumps(message).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Anthropic)
    Thread(target=server.serve_forever, daemon=True).start()
    model = ChatAnthropic(  # type: ignore[call-arg]  # two fields have defaults that their types do not show
        model_name="claude-sonnet-4", api_key="unused", base_url=f"http://127.0.0.1:{server.server_address[1]}"
    )
    with observe() as trajectory:
        state = create_agent(model, [add]).invoke(ASKED)
    server.shutdown()
    server.server_close()
    assert state["messages"][-1].text == "it is 3"
    assert texts(trajectory)[-1] == "assistant: it is 3"
    assert trajectory.metadata["calls"][0]["kind"] == "ChatAnthropic"
    assert trajectory.tools is not None and trajectory.tools[0]["function"]["parameters"]["required"] == ["a", "b"]


class Router(BaseChatModel):
    """A chat model that hands its calls to another."""

    inner: BaseChatModel

    @property
    def _llm_type(self) -> str:
        return "router"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=self.inner.invoke(messages))])


async def test_a_model_that_delegates_to_another_is_one_call() -> None:
    router = Router(inner=GenericFakeChatModel(messages=iter([AIMessage("one"), AIMessage("two")])))
    with observe() as trajectory:
        router.invoke("hi")
        await router.ainvoke("hi")
    assert (trajectory.metrics["calls"], len(trajectory.additional_histories)) == (2, 1)
    assert [call["kind"] for call in trajectory.metadata["calls"]] == ["Router", "Router"]


def test_selected_calls_only() -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("a"), AIMessage("b"), AIMessage("c")]))
    with observe(select={"tag": "main"}, exclude={"tag": "title"}) as trajectory:
        model.invoke("x")
        model.invoke("y", {"tags": ["main"]})
        model.invoke("z", {"tags": ["main", "title"]})
    assert texts(trajectory) == ["user: y", "assistant: b"]


def test_a_failed_call_and_an_exception_are_kept() -> None:
    model = ChatOpenAI(model="own", api_key=SecretStr("unused"), base_url="http://127.0.0.1:9/v1", max_retries=0)
    watched = observe()
    with pytest.raises(Exception, match="Connection error"), watched as trajectory:
        model.invoke("hi")
    assert trajectory.exception is not None
    assert trajectory.metrics["calls"] == 1
    assert "a call of own has no answer (failed)" in trajectory.logs[0]


def test_inside_a_capture_the_observed_calls_stay_on_the_apps_own_model(
    stand_in: TrainableModel, obedient: ScriptedServer
) -> None:
    with scripted_llm([says("mine")]) as own:
        model = ChatOpenAI(model="own", api_key=SecretStr("unused"), base_url=own.url)
        with capture(stand_in) as captured, observe(select={"tag": "expert"}) as observed:
            assert model.invoke("hi", {"tags": ["expert"]}).text == "mine"
            assert model.invoke("hi").text == "heard: hi"
    assert len(obedient.calls(captured.id)) == 1
    assert texts(observed) == ["user: hi", "assistant: mine"]


async def test_what_was_observed_can_be_kept_with_a_model(stand_in: TrainableModel) -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("a")]))
    async with observe() as trajectory:
        await model.ainvoke("x")
    await stand_in.log([trajectory], split="observed")
    kept = await (await stand_in.api()).trajectory(trajectory.id)
    assert kept.trajectory is not None
    assert [message["content"] for message in kept.trajectory.histories[0].messages] == ["x", "a"]


def leaking(request: LlmRequest) -> LlmReply:
    last = request.messages[-1]
    return calls_tool("add", {"a": 1, "b": 2, "note": KEY}) if last["role"] == "user" else says(f"by {KEY}")


KEY = "sk-live-0123456789abcdef"


@pytest.mark.parametrize("filter", [None, lambda text: text.replace(KEY, MARK)], ids=["default", "own"])
def test_secrets_of_what_was_observed_are_masked_and_counted(filter: Any) -> None:
    with scripted_llm(leaking) as own, observe(filter=filter) as trajectory:
        own_agent(own.url).invoke({"messages": [("system", "Add."), ("user", f"with {KEY}: 1 + 2?")]})
    kept = trajectory.model_dump_json()
    assert KEY not in kept and trajectory.metrics["masked_texts"] == 3
    assert texts(trajectory)[1] == f"user: with {MARK}: 1 + 2?" and texts(trajectory)[-1] == f"assistant: by {MARK}"
    asked: Any = trajectory.messages()[2]
    [call] = asked["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2, "note": MARK}


def test_what_is_observed_is_kept_as_it_was_where_nothing_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_llm(script) as own, observe() as plain:
        own_agent(own.url).invoke(ASKED)
    assert "masked_texts" not in plain.metrics
    monkeypatch.setenv("OFFBOOK_REDACT", "0")
    with scripted_llm(leaking) as own, observe() as kept:
        own_agent(own.url).invoke(ASKED)
    assert KEY in texts(kept)[-1] and "masked_texts" not in kept.metrics
