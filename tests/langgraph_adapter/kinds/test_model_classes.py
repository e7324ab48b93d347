"""Whatever class the app's model has, and however it is made: by name, by config, in a node, by a class of the app's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from langchain.chat_models import init_chat_model
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, FakeListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatResult
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

from .apps import TEAL, City, add, asked, last, own_model
from .policy import Policy, origins

ORDER = "add(a=1, b=2)"


@pytest.mark.parametrize("name", ["openai:gpt-4.1-mini", "anthropic:claude-sonnet-4-5", "groq:llama-3.3-70b"])
def test_a_model_that_is_made_by_name(policy: Policy, name: str) -> None:
    model = init_chat_model(name, temperature=0, max_tokens=50)
    with policy.rollout() as made:
        assert model.bind_tools([add]).invoke(ORDER).tool_calls[0]["args"] == {"a": 1, "b": 2}
    assert origins(made.calls(1))[0].model == name.partition(":")[2]
    assert made.requests[0]["max_completion_tokens"] == 50


def test_a_configurable_model_with_declarative_methods(policy: Policy) -> None:
    model = init_chat_model("openai:gpt-4.1-mini", configurable_fields="any", config_prefix="main")
    chain = model.bind_tools([add], tool_choice="any").with_config(tags=["mine"])
    with policy.rollout() as made:
        answer = chain.invoke(
            ORDER, {"configurable": {"main_model": "claude-sonnet-4-5", "main_model_provider": "anthropic"}}
        )
        assert model.with_structured_output(City).invoke("which city?") == TEAL
    assert answer.tool_calls[0]["args"] == {"a": 1, "b": 2}
    first, second = made.calls(2)
    assert [origin.model for origin in origins((first, second))] == ["claude-sonnet-4-5", "gpt-4.1-mini"]
    assert "mine" in (first.origin.tags if first.origin else ())
    assert made.requests[0]["tool_choice"] == "required"


def test_a_model_that_is_built_inside_a_node(policy: Policy) -> None:
    def node(state: MessagesState) -> dict[str, Any]:
        class MyChat(ChatOpenAI):
            """A class that did not exist when the capture began."""

        return {"messages": [MyChat(model="mine", stop=["END"]).invoke(state["messages"])]}  # type: ignore[call-arg]  # an alias that pydantic accepts

    with policy.rollout() as made:
        app = StateGraph(MessagesState).add_node("node", node).add_edge(START, "node").compile()
        assert last(app.invoke(asked("hi"))) == "heard: hi"
    assert origins(made.calls(1))[0].model == "mine"
    assert made.requests[0]["stop"] == ["END"]


def test_fakes_that_an_app_uses_in_its_own_tests(policy: Policy) -> None:
    with policy.rollout() as made:
        assert FakeListChatModel(responses=["scripted"]).invoke("hi").text == "heard: hi"
        model = GenericFakeChatModel(messages=iter([AIMessage("scripted")]))
        assert "".join(chunk.text for chunk in model.stream("hi")) == "heard: hi"
    made.calls(2)


class HouseModel(BaseChatModel):
    """A chat model of the app's own that overrides an entry point, defined while no capture was active."""

    @property
    def _llm_type(self) -> str:
        return "house"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        raise AssertionError("the app's own model was called")

    def stream(self, input: Any, config: Any = None, **kwargs: Any) -> Iterator[AIMessageChunk]:
        yield from super().stream(input, config, **kwargs)

    async def astream(self, input: Any, config: Any = None, **kwargs: Any) -> AsyncIterator[AIMessageChunk]:
        async for chunk in super().astream(input, config, **kwargs):
            yield chunk


async def test_a_model_class_of_the_apps_own_that_overrides_its_streams(policy: Policy) -> None:
    async with policy.rollout() as made:
        assert "".join([chunk.text for chunk in HouseModel().stream("one two")]) == "heard: one two"
        assert "".join([chunk.text async for chunk in HouseModel().astream("one two")]) == "heard: one two"
        assert (await HouseModel().ainvoke("one two")).text == "heard: one two"
    assert {origin.kind for origin in origins(made.calls(3))} == {"HouseModel"}


def test_a_model_class_that_is_made_during_the_capture_and_overrides_an_entry_point(policy: Policy) -> None:
    with policy.rollout() as made:

        class LateModel(HouseModel):
            def stream(self, input: Any, config: Any = None, **kwargs: Any) -> Iterator[AIMessageChunk]:
                raise AssertionError("the app's own model was called")

        assert "".join(chunk.text for chunk in LateModel().stream("one two")) == "heard: one two"
    made.calls(1)


class Endless(HouseModel):
    """A model that says in Ollama's word that its answers have no limit."""

    num_predict: int = -1


def test_a_model_whose_answers_have_no_limit(policy: Policy) -> None:
    with policy.rollout() as made:
        assert Endless().invoke("hi").text == "heard: hi"
    made.calls(1)
    assert made.requests[0]["max_completion_tokens"] == 1024


class Wrapper(BaseChatModel):
    """A chat model that adds a word and hands the call to another."""

    inner: Any

    @property
    def _llm_type(self) -> str:
        return "wrapper"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self.inner._generate(messages, stop, run_manager, **kwargs)


def test_a_model_that_delegates_to_another_makes_one_call(policy: Policy) -> None:
    with policy.rollout() as made:
        assert Wrapper(inner=own_model()).bind(stop=["END"]).invoke("hi").text == "heard: hi"
    made.calls(1)
    assert made.requests[0]["stop"] == ["END"]
