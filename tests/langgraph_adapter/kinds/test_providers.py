"""Apps written for other providers' models, and for OpenAI's newer API: what they bind means the same to the policy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_google_genai import ChatGoogleGenerativeAI
from langchain_groq import ChatGroq
from langchain_openai import AzureChatOpenAI, ChatOpenAI
from openai import BadRequestError
from pydantic import SecretStr

from offbook.base.errors import CaptureError
from offbook_langgraph.calls.provider_formats import warn_dropped

from .apps import TEAL, City, add, asked, double, last, own_model
from .policy import Policy, names_of, one_branch

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ORDER = "add(a=1, b=2)"


def claude(**options: Any) -> ChatAnthropic:
    return ChatAnthropic(model="claude-sonnet-4-5", max_retries=0, **options)  # type: ignore[call-arg]


def gemini(**options: Any) -> ChatGoogleGenerativeAI:
    return ChatGoogleGenerativeAI(model="gemini-2.5-pro", api_key=SecretStr("unused"), **options)


def groq(**options: Any) -> ChatGroq:
    return ChatGroq(model="llama-3.3-70b", max_retries=0, **options)


@pytest.mark.parametrize("make", [claude, groq])
def test_an_agent_of_another_provider(policy: Policy, make: Any) -> None:
    app = create_agent(make(), [add, double])
    with policy.rollout() as made:
        assert last(app.invoke(asked(f"{ORDER} and double(x=3) then double(x=4)"))) == "the tools said 3, 6, 8"
    calls = made.calls(3)
    assert one_branch(calls)
    assert calls[0].tools == calls[1].tools
    assert names_of(made.requests[0]["tools"]) == ["add", "double"]
    assert made.requests[0]["tools"][0]["function"]["parameters"] == ADD


@pytest.mark.parametrize("make", [claude, groq])
async def test_a_streamed_agent_of_another_provider(policy: Policy, make: Any) -> None:
    app = create_agent(make(), [add])
    texts: list[str] = []
    async with policy.rollout() as made:
        async for chunk, _ in app.astream(asked(ORDER), stream_mode="messages"):
            texts += [chunk.text] if isinstance(chunk, AIMessageChunk) and chunk.text else []
    assert "".join(texts) == "the tools said 3"
    assert len(texts) == 4
    assert one_branch(made.calls(2))


@pytest.mark.parametrize("make", [claude, groq])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_an_object_from_another_provider(policy: Policy, make: Any, method: Any) -> None:
    with policy.rollout() as made:
        assert make().with_structured_output(City, method=method).invoke("which city?") == TEAL
    made.calls(1)
    request = made.requests[0]
    if method == "json_schema":
        assert set(request["response_format"]["json_schema"]["schema"]["properties"]) == {"city", "size"}
    else:
        assert request["tool_choice"] == {"type": "function", "function": {"name": "City"}}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("any", "required"),
        ({"type": "any"}, "required"),
        ({"type": "auto"}, "auto"),
        ("add", {"type": "function", "function": {"name": "add"}}),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_a_tool_choice_of_anthropics(policy: Policy, choice: Any, expected: Any) -> None:
    with policy.rollout() as made:
        answer = (
            claude().bind_tools([add], tool_choice=choice, parallel_tool_calls=False).invoke(f"{ORDER} and {ORDER}")
        )
    assert [call["args"] for call in answer.tool_calls] == [{"a": 1, "b": 2}]
    made.calls(1)
    assert (made.requests[0]["tool_choice"], made.requests[0]["parallel_tool_calls"]) == (expected, False)


def test_tools_as_anthropic_writes_them(policy: Policy) -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": ADD, "cache_control": {"type": "ephemeral"}}
    with policy.rollout() as made:
        answer = claude().bind_tools([{**tool, "type": "custom", "strict": True}]).invoke(ORDER)
    assert answer.tool_calls[0]["args"] == {"a": 1, "b": 2}
    made.calls(1)
    function = {"name": "add", "description": "Adds.", "parameters": ADD, "strict": True}
    assert made.requests[0]["tools"] == [{"type": "function", "function": function}]


def test_anthropics_own_settings(policy: Policy) -> None:
    model = claude(stop=["END"], max_tokens=77, thinking={"type": "enabled", "budget_tokens": 1024}, top_k=5)
    with policy.rollout() as made:
        assert model.bind(cache_control={"type": "ephemeral"}, top_k=7).invoke("hi").text == "heard: hi"
    made.calls(1)
    request = made.requests[0]
    assert (request["stop"], request["max_completion_tokens"], request["top_k"]) == (["END"], 77, 0)
    assert request["temperature"] == 1.0


def test_prompts_as_anthropic_writes_them(policy: Policy) -> None:
    cached = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
    used = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}}
    calls: Any = [{"name": "add", "args": {"a": 1, "b": 2}, "id": "toolu_1"}]
    prompt: list[BaseMessage] = [
        SystemMessage([cached]),
        HumanMessage("add"),
        AIMessage(
            [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I add."}, used],
            tool_calls=calls,
        ),
        ToolMessage([{"type": "text", "text": "3"}], tool_call_id="toolu_1"),
    ]
    with policy.rollout() as made:
        assert claude().invoke(prompt).text == "the tools said 3"
    made.calls(1)
    system, _, answer, result = made.requests[0]["messages"]
    assert system["content"][0]["text"] == "Be brief."
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
    assert "tool_use" not in json.dumps(answer["content"])
    assert "thinking" not in json.dumps(answer["content"])
    assert "3" in json.dumps(result["content"])


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "google": (
        {
            "response_mime_type": "application/json",
            "response_json_schema": City.model_json_schema(),
            "safety_settings": {},
        },
        {"schema": City.model_json_schema()},
    ),
    "amazon": (
        {
            "output_config": {
                "textFormat": {
                    "type": "json_schema",
                    "structure": {"jsonSchema": {"schema": json.dumps(City.model_json_schema()), "name": "City"}},
                }
            }
        },
        {"schema": City.model_json_schema()},
    ),
    "amazon's tools": (
        {
            "tools": [{"toolSpec": {"name": "add", "inputSchema": {"json": ADD}}}, {"cachePoint": {"type": "default"}}],
            "tool_choice": {"tool": {"name": "add"}},
        },
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    ),
    "ollama": ({"format": City.model_json_schema(), "keep_alive": "5m"}, {"schema": City.model_json_schema()}),
    "ollama's json": ({"format": "json"}, {"response_format": {"type": "json_object"}}),
    "anthropic": ({"stop_sequences": ["END"], "betas": ["x"]}, {"stop": ["END"]}),
    "responses": (
        {
            "tools": [{"type": "function", "name": "add", "parameters": ADD}],
            "tool_choice": {"type": "function", "name": "add"},
        },
        {"tool_choice": {"type": "function", "function": {"name": "add"}}},
    ),
}
"""What the chat models of other providers bind, and what it is here."""


@pytest.mark.parametrize("provider", OTHERS)
def test_what_other_providers_bind(policy: Policy, provider: str) -> None:
    bound, expected = OTHERS[provider]
    with policy.rollout() as made:
        own_model().bind(**bound).invoke(ORDER)
    made.calls(1)
    request = made.requests[0]
    for name, value in expected.items():
        assert (request["response_format"]["json_schema"]["schema"] if name == "schema" else request[name]) == value
    if "tools" in bound:
        assert request["tools"] == [{"type": "function", "function": {"name": "add", "parameters": ADD}}]


ANOTHER_POLICYS: dict[str, Any] = {
    "logit_bias": {"50256": -100},
    "frequency_penalty": 1,
    "presence_penalty": 0.5,
    "reasoning_effort": "low",
    "extra_body": {"top_k": 3},
}
"""Options that would change what is sampled, in terms of the app's own model."""


@pytest.mark.parametrize("option", ANOTHER_POLICYS)
@pytest.mark.parametrize("place", ["bind", "constructor"])
def test_an_option_that_only_fits_the_apps_own_model_is_left_out_with_a_warning(
    policy: Policy, caplog: pytest.LogCaptureFixture, option: str, place: str
) -> None:
    warn_dropped.cache_clear()
    given = {option: ANOTHER_POLICYS[option]}
    model = own_model().bind(**given) if place == "bind" else own_model(**given)
    with policy.rollout() as made:
        model.invoke("hi")
        model.invoke("hi again")
    assert made.calls(2)[0].constrained is None
    assert option not in made.requests[0]
    assert made.requests[0]["top_k"] == 0
    assert caplog.text.count(f"{option} of ChatOpenAI is not passed on to the trained model: ") == 1


def test_neutral_values_of_such_options_are_not_worth_a_warning(
    policy: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    warn_dropped.cache_clear()
    with policy.rollout() as made:
        own_model(frequency_penalty=0, logit_bias={}).bind(repetition_penalty=1.0).invoke("hi")
    made.calls(1)
    assert not caplog.records


def test_what_googles_constructor_sets_is_what_its_bind_sets(policy: Policy) -> None:
    schema = City.model_json_schema()
    model = gemini(response_mime_type="application/json", response_schema=schema, max_output_tokens=77)
    with policy.rollout() as made:
        model.invoke("which city?")
        own_model().bind(max_output_tokens=77).invoke("hi")
    made.calls(2)
    assert made.requests[0]["response_format"]["json_schema"]["schema"] == schema
    assert [request["max_completion_tokens"] for request in made.requests] == [77, 77]


@pytest.mark.parametrize(
    "make",
    [
        lambda: gemini(cached_content="cachedContents/1"),
        lambda: claude(mcp_servers=[{"type": "url", "url": "https://example.com/mcp", "name": "notes"}]),
    ],
)
def test_what_a_constructor_leaves_to_the_provider_is_refused_by_name(policy: Policy, make: Any) -> None:
    with (
        pytest.raises(CaptureError, match=r"(cached_content|mcp_servers) cannot be redirected"),
        policy.rollout() as made,
    ):
        make().invoke("hi")
    made.recorded(0)


def responses_model(**options: Any) -> ChatOpenAI:
    return own_model(use_responses_api=True, **options)


async def test_an_agent_on_the_responses_api(policy: Policy) -> None:
    model = responses_model(reasoning={"effort": "low"}, include=["reasoning.encrypted_content"], store=False)
    app = create_agent(model, [add])
    async with policy.rollout() as made:
        assert last(await app.ainvoke(asked(ORDER))) == "the tools said 3"
    assert one_branch(made.calls(2))
    assert names_of(made.requests[0]["tools"]) == ["add"]


def test_a_streamed_object_on_the_responses_api(policy: Policy) -> None:
    with policy.rollout() as made:
        model = responses_model().with_structured_output(City, method="json_schema", strict=True)
        assert list(model.stream("which city?"))[-1] == TEAL
    made.calls(1)
    assert made.requests[0]["response_format"]["json_schema"]["strict"] is True


@pytest.mark.parametrize("version", ["v1", "responses/v1"])
def test_an_app_that_reads_content_blocks(policy: Policy, version: str) -> None:
    model = own_model(output_version=version, use_responses_api=version != "v1")
    with policy.rollout() as made:
        answer = model.bind_tools([add]).invoke("hi")
        again = model.invoke([HumanMessage("hi"), answer, HumanMessage("you?")])
    assert [block["type"] for block in answer.content_blocks] == ["text"]
    assert (answer.text, again.text) == ("heard: hi", "heard: you?")
    if version == "v1":
        assert answer.content == answer.content_blocks
    made.calls(2)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        {"google_search": {}},
        {"type": "code_interpreter", "container": {"type": "auto"}},
    ],
)
def test_a_tool_that_the_provider_runs_is_refused_by_name(policy: Policy, tool: dict[str, Any]) -> None:
    name = tool.get("type", "google_search")
    with pytest.raises(CaptureError, match=f"the tool '{name}' is run by the provider"), policy.rollout() as made:
        own_model().bind(tools=[tool]).invoke("hi")
    made.recorded(0)


def test_functions_of_openais_first_api_are_refused_with_what_replaced_them(policy: Policy) -> None:
    with policy.rollout() as made, pytest.raises(BadRequestError, match="functions were replaced by `tools`"):
        own_model().bind(functions=[{"name": "add", "parameters": ADD}]).invoke("hi")
    made.recorded(0)


@pytest.mark.parametrize("given", [{"previous_response_id": "resp_1"}, {"cached_content": "cachedContents/1"}])
def test_a_history_that_is_kept_at_the_provider_is_refused_by_name(policy: Policy, given: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match=next(iter(given))), policy.rollout() as made:
        own_model().bind(**given).invoke("hi")
    made.recorded(0)


PICTURES: list[Any] = [
    (own_model, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
    (own_model, {"type": "image", "base64": "AAAA", "mime_type": "image/png"}),
    (claude, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}),
]


@pytest.mark.parametrize(("make", "picture"), PICTURES)
@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_a_picture_is_refused_with_its_place(policy: Policy, make: Any, picture: Any, way: str) -> None:
    named = rf"messages\[1\]\.content\[1\]: a block of type '{picture['type']}' in a human message"
    with pytest.raises(CaptureError, match=named), policy.rollout() as made:
        messages = [("system", "look"), HumanMessage([{"type": "text", "text": "what is this?"}, picture])]
        make().invoke(messages) if way == "invoke" else list(make().stream(messages))
    made.recorded(0)


def test_azures_model(policy: Policy) -> None:
    model = AzureChatOpenAI(
        azure_endpoint="http://127.0.0.1:9",
        api_version="2024-10-21",
        azure_deployment="mine",
        api_key=SecretStr("unused"),
    )
    with policy.rollout() as made:
        assert model.with_structured_output(City).invoke("which city?") == TEAL
    made.calls(1)
