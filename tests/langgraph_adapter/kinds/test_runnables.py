"""Chains without a graph, and what LangChain puts around a model: prompts, history, branches, callbacks, usage."""

from __future__ import annotations

import asyncio
from collections import Counter
from operator import itemgetter
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler, get_usage_metadata_callback
from langchain_core.chat_history import InMemoryChatMessageHistory
from langchain_core.messages import HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import ConfigurableField, RunnableBranch, RunnableLambda, RunnablePassthrough, chain
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import tool
from langchain_core.tracers.context import collect_runs

from .apps import add, asked, last, own_model
from .policy import Policy, origins

PROMPT = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{question}")])


def test_a_chain_of_prompt_model_and_parser(policy: Policy) -> None:
    with policy.rollout() as made:
        assert (PROMPT | own_model() | StrOutputParser()).invoke({"question": "hi"}) == "heard: hi"
    assert made.calls(1)[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    )


def test_a_chain_that_is_a_function(policy: Policy) -> None:
    @chain
    def twice(question: str) -> str:
        return own_model().invoke(own_model().invoke(question).text).text

    with policy.rollout() as made:
        assert twice.invoke("hi") == "heard: heard: hi"
    made.calls(2)


def test_a_chain_that_assigns_and_branches(policy: Policy) -> None:
    long = RunnableLambda[Any, str](lambda given: f"long {given['question']}") | own_model()
    branch = RunnableBranch((lambda given: len(given["question"]) > 5, long), PROMPT | own_model())
    app = RunnablePassthrough.assign(title=PROMPT | own_model() | StrOutputParser()) | {
        "title": itemgetter("title"),
        "answer": branch | StrOutputParser(),
    }
    with policy.rollout() as made:
        assert app.invoke({"question": "a question"}) == {
            "title": "heard: a question",
            "answer": "heard: long a question",
        }
    made.calls(2)


def test_a_chain_with_message_history(policy: Policy) -> None:
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("history"), ("user", "{question}")])
    kept = InMemoryChatMessageHistory()
    app = RunnableWithMessageHistory(
        prompt | own_model(),
        lambda: kept,
        input_messages_key="question",
        history_messages_key="history",
        history_factory_config=[],
    )
    with policy.rollout() as made:
        app.invoke({"question": "one"})
        assert app.invoke({"question": "two"}).text == "heard: two"
    assert [len(call.messages) for call in made.calls(2)] == [1, 3]


def test_a_model_with_configurable_fields_and_alternatives(policy: Policy) -> None:
    model = own_model().configurable_fields(max_tokens=ConfigurableField("limit"))
    either = model.configurable_alternatives(ConfigurableField("which"), other=own_model(model="other"))
    with policy.rollout() as made:
        either.with_config(configurable={"limit": 9}).invoke("hi")
        either.with_config(configurable={"which": "other"}).invoke("hi")
    assert [origin.model for origin in origins(made.calls(2))] == ["gpt-4.1-mini", "other"]
    assert made.requests[0]["max_completion_tokens"] == 9


def test_a_tool_that_asks_a_model(policy: Policy) -> None:
    @tool
    def translate(text: str) -> str:
        """Translate a text."""
        return own_model(tags=["translation"]).invoke(text).text

    app = create_agent(own_model(), [translate])
    with policy.rollout() as made:
        assert last(app.invoke(asked("translate(text='hallo')"))) == "the tools said heard: hallo"
    calls = made.calls(3)
    assert [origin.node for origin in origins(calls)] == ["model", "tools", "model"]
    assert origins(calls)[1].tags == ("translation",)


class Seen(BaseCallbackHandler):
    """What an app's handler hears."""

    def __init__(self) -> None:
        self.heard: Counter[str] = Counter()
        self.tokens = ""

    def on_chat_model_start(self, *args: Any, **kwargs: Any) -> None:
        self.heard["start"] += 1

    def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
        self.tokens += token if isinstance(token, str) else ""

    def on_llm_end(self, *args: Any, **kwargs: Any) -> None:
        self.heard["end"] += 1

    def on_llm_error(self, *args: Any, **kwargs: Any) -> None:
        self.heard["error"] += 1


def test_the_apps_callbacks_hear_each_call_once(policy: Policy) -> None:
    of_model, of_call = Seen(), Seen()
    app = create_agent(own_model(callbacks=[of_model]), [add])
    with policy.rollout() as made:
        app.invoke(asked("add(a=1, b=2)"), {"callbacks": [of_call]})
    made.calls(2)
    assert of_model.heard == of_call.heard == {"start": 2, "end": 2}


def test_a_model_that_streams_to_its_callbacks(policy: Policy) -> None:
    seen = Seen()
    with policy.rollout() as made:
        own_model(streaming=True, callbacks=[seen]).invoke("one two")
    made.calls(1)
    assert seen.tokens == "heard: one two"


def test_a_traced_run_has_the_tree_that_it_had(policy: Policy) -> None:
    with policy.rollout() as made, collect_runs() as traced:
        (PROMPT | own_model()).with_config(run_name="answer").invoke({"question": "hi"})
    made.calls(1)
    [root] = traced.traced_runs
    assert root.name == "answer"
    assert [run.run_type for run in root.child_runs] == ["prompt", "llm"]
    assert root.child_runs[1].end_time is not None


async def test_usage_is_counted(policy: Policy) -> None:
    with get_usage_metadata_callback() as usage:
        async with policy.rollout() as made:
            await own_model().ainvoke("one two")
            _ = [chunk async for chunk in own_model().astream("one two")]
    calls = made.calls(2)
    [total] = usage.usage_metadata.values()
    assert total["output_tokens"] == sum(len(call.outputs[0].token_ids) for call in calls)
    assert total["input_tokens"] == sum(len(call.prompt_ids) for call in calls)


async def test_one_app_run_many_times_at_once_in_one_rollout(policy: Policy) -> None:
    app = create_agent(own_model(), [add])
    async with policy.rollout() as made:
        states = await asyncio.gather(*(app.ainvoke(asked(f"add(a=1, b={number})")) for number in range(5)))
    assert [last(state) for state in states] == [f"the tools said {number + 1}" for number in range(5)]
    made.calls(10)


def test_the_answer_is_what_was_sampled(policy: Policy) -> None:
    with policy.rollout() as made:
        answer = own_model().bind_tools([add]).invoke("add(a=1, b=2)")
    [call] = made.calls(1)
    sampled = call.outputs[0].message["tool_calls"]
    assert [(each["id"], each["name"]) for each in answer.tool_calls] == [
        (each["id"], each["function"]["name"]) for each in sampled
    ]
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == len(call.prompt_ids)


def test_several_answers_to_one_prompt(policy: Policy) -> None:
    with policy.rollout() as made:
        found = own_model().generate([[HumanMessage("hi")]], n=2)
    assert [each.text for each in found.generations[0]] == ["heard: hi", "heard: hi"]
    assert len(made.calls(1)[0].outputs) == 2


@pytest.mark.parametrize("asked_in", ["the call", "the model"])
def test_logprobs_that_the_app_asks_for(policy: Policy, asked_in: str) -> None:
    with policy.rollout() as made:
        model = own_model().bind(logprobs=True) if asked_in == "the call" else own_model(logprobs=True)
        answer = model.invoke("hi")
    given = [each["logprob"] for each in answer.response_metadata["logprobs"]["content"]]
    assert tuple(given) == made.calls(1)[0].outputs[0].logprobs


def test_what_the_app_tells_its_own_endpoint_is_not_told_to_ours(policy: Policy) -> None:
    routed = {
        "extra_body": {"provider": {"order": ["x"]}},
        "extra_headers": {"authorization": "theirs"},
        "timeout": 0.001,
    }
    with policy.rollout() as made:
        assert own_model(extra_body=routed["extra_body"]).bind(**routed).invoke("hi").text == "heard: hi"
    made.calls(1)
    assert "provider" not in made.requests[0]
