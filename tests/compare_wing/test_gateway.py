"""The endpoint through which an app is answered by other LLMs, over real HTTP on both sides."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI

from offbook import Trajectory
from offbook.base.errors import BudgetExceeded, ConfigError, LlmError
from offbook.client.rollouts.capture import capturing
from offbook.llms import Llm, budget
from offbook.testing import LlmReply, LlmRequest, cuts, fails, refuses, says, scripted_llm
from offbook_compare.gateway import Gateway
from offbook_compare.journal import MeasuredCall

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
]


def big(url: str, **options: Any) -> Llm:
    return Llm("openai/big", api_base=url, cache=None, retries=1, timeout=20.0, **options)


async def test_text_tool_calls_usage_and_cost_reach_the_app_and_the_record() -> None:
    with (
        scripted_llm([says(None, finish_reason="tool_calls", tool_calls=[CALL]), says("done", usage=(20, 2))]) as api,
        Gateway({"big": big(api.url, prices={"prompt": 2.0, "completion": 8.0})}) as gateway,
    ):
        trajectory = Trajectory()
        client = gateway.model("big").openai_client()
        with capturing(trajectory):
            first = await client.chat.completions.create(model="big", messages=HELLO, tools=TOOLS, temperature=0.0)
            second = await client.chat.completions.create(model="big", messages=HELLO)
        calls = gateway.take_calls([trajectory.id])
        again = gateway.take_calls([trajectory.id])
    [call] = first.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("look", '{"at": "x"}')
    assert second.choices[0].message.content == "done"
    assert [each.outputs[0].message.get("content") for each in calls] == [None, "done"]
    assert [(each.prompt_tokens, each.outputs[0].tokens) for each in calls] == [(10, 5), (20, 2)]
    assert [each.cost for each in calls] == pytest.approx([60e-6, 56e-6])
    assert all(each.ended_at > each.started_at for each in calls)
    assert again == []
    assert api.requests[0].body["tools"] == TOOLS
    assert api.requests[0].body["temperature"] == 0.0
    assert api.requests[0].body["model"] == "big"


async def test_streams_have_the_whole_message_its_end_and_the_usage() -> None:
    script = [says("all of it"), says(None, finish_reason="tool_calls", tool_calls=[CALL])]
    with scripted_llm(script) as api, Gateway({"big": big(api.url)}) as gateway:
        client = gateway.model("big").openai_client()
        texts: list[str] = []
        usage, ends = None, []
        options = {"include_usage": True}
        async for chunk in await client.chat.completions.create(
            model="big",
            messages=HELLO,
            stream=True,
            stream_options=options,  # type: ignore[arg-type]
        ):
            texts += [choice.delta.content or "" for choice in chunk.choices]
            ends += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
            usage = chunk.usage or usage
        called = [
            part.function.name
            async for chunk in await client.chat.completions.create(model="big", messages=HELLO, stream=True)
            for choice in chunk.choices
            for part in choice.delta.tool_calls or []
            if part.function is not None
        ]
    assert ("".join(texts), ends) == ("all of it", ["stop"])
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (10, 5)
    assert called == ["look"]


async def test_a_cut_answer_and_a_refusal_are_answers() -> None:
    with scripted_llm([cuts("half of"), refuses("not this")]) as api, Gateway({"big": big(api.url)}) as gateway:
        trajectory = Trajectory()
        client = gateway.model("big").openai_client()
        with capturing(trajectory):
            cut = await client.chat.completions.create(model="big", messages=HELLO)
            refused = await client.chat.completions.create(model="big", messages=HELLO)
        calls = gateway.take_calls([trajectory.id])
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("half of", "length")
    assert refused.choices[0].message.refusal == "not this"
    assert [MeasuredCall.of(each).cut for each in calls] == [True, False]


async def test_a_model_that_takes_no_temperature_is_asked_without_one() -> None:
    def picky(request: LlmRequest) -> LlmReply:
        if "temperature" in request.body:
            return fails(400, "Unsupported value: 'temperature' does not support 0.0 with this model")
        return says("warm")

    with scripted_llm(picky) as api, Gateway({"big": big(api.url)}) as gateway:
        client = gateway.model("big").openai_client()
        for _ in range(2):
            answer = await client.chat.completions.create(model="big", messages=HELLO, temperature=0.0)
            assert answer.choices[0].message.content == "warm"
    assert ["temperature" in each.body for each in api.requests] == [True, False, False]


def test_sync_clients_and_base_urls_are_attributed_to_the_capture() -> None:
    with scripted_llm([says("hi")]) as api, Gateway({"big": big(api.url)}) as gateway:
        trajectory, model = Trajectory(), gateway.model("big")
        with capturing(trajectory):
            client = OpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key, max_retries=0)
        assert client.chat.completions.create(model="big", messages=HELLO).choices[0].message.content == "hi"  # type: ignore[arg-type]
        client.close()
        assert len(gateway.take_calls([trajectory.id])) == 1


async def test_a_failure_of_the_provider_is_an_error_that_names_it_and_is_not_asked_again_by_the_client() -> None:
    with scripted_llm([fails(500, "on fire")]) as api, Gateway({"big": big(api.url)}) as gateway:
        model = gateway.model("big")
        client = AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
        with pytest.raises(APIStatusError, match="on fire") as raised:
            await client.chat.completions.create(model="big", messages=HELLO)  # type: ignore[arg-type]
        await client.close()
    assert raised.value.status_code == 502
    assert len(api.requests) == 2  # one, and the Llm's retry
    assert gateway.fault is None


@pytest.mark.parametrize(
    ("reply", "kind"),
    [(fails(401, "who are you?"), LlmError), (fails(429, "no money", code="insufficient_quota"), LlmError)],
)
async def test_what_every_call_would_meet_is_a_fault_and_ends_the_asking(
    reply: LlmReply, kind: type[Exception]
) -> None:
    with scripted_llm([reply]) as api, Gateway({"big": big(api.url)}) as gateway:
        client = gateway.model("big").openai_client()
        for _ in range(2):
            with pytest.raises(APIStatusError):
                await client.chat.completions.create(model="big", messages=HELLO)  # type: ignore[arg-type]
    assert isinstance(gateway.fault, kind)
    assert len(api.requests) == 1


async def test_the_budget_around_the_gateway_holds_in_it() -> None:
    with (
        scripted_llm([says("hi", usage=(1000, 1000))]) as api,
        budget(0.001) as spending,
        Gateway({"big": big(api.url, prices={"prompt": 1.0, "completion": 1.0})}) as gateway,
    ):
        client = gateway.model("big").openai_client()
        await client.chat.completions.create(model="big", messages=HELLO)  # type: ignore[arg-type]
        with pytest.raises(APIStatusError, match="max_cost"):
            await client.chat.completions.create(model="big", messages=HELLO)  # type: ignore[arg-type]
    assert isinstance(gateway.fault, BudgetExceeded)
    assert spending.by_purpose()["compare"].requests == 1


async def test_an_unknown_provider_is_a_fault() -> None:
    with Gateway({"big": Llm("nowhere/big", cache=None)}) as gateway:
        client = gateway.model("big").openai_client()
        with pytest.raises(APIStatusError, match="provider"):
            await client.chat.completions.create(model="big", messages=HELLO)  # type: ignore[arg-type]
    assert isinstance(gateway.fault, ConfigError)


def test_requests_without_the_key_to_other_paths_and_without_json_are_rejected() -> None:
    with Gateway({"big": big("http://127.0.0.1:1/v1")}) as gateway:
        model = gateway.model("big")
        url, key = (
            f"{model.inference_base_url}/chat/completions",
            {"authorization": f"Bearer {model.inference_api_key}"},
        )
        with httpx.Client() as client:
            assert client.post(url, json={}).status_code == 401
            assert client.post(f"{model.inference_base_url}/embeddings", headers=key).status_code == 404
            assert client.post(url, content=b"{", headers=key | {"content-type": "application/json"}).status_code == 400
            assert client.post(url, json={"model": "big"}, headers=key).status_code == 400
            assert client.post(url, json={"model": "x", "messages": HELLO}, headers=key).status_code == 404


def test_a_call_that_no_record_can_hold_is_refused_before_it_is_paid_for() -> None:
    odd: list[dict[str, Any]] = [{"messages": ["hello"]}, {"messages": HELLO, "tools": [1]}]
    with scripted_llm([says("too late")]) as api, Gateway({"big": big(api.url)}) as gateway, httpx.Client() as client:
        model = gateway.model("big")
        url, key = f"{model.inference_base_url}/chat/completions", model.inference_api_key
        for fields in odd:
            answer = client.post(url, json={"model": "big"} | fields, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 400, fields
            assert list(fields)[-1] in answer.json()["error"]["message"]
    assert api.requests == []
