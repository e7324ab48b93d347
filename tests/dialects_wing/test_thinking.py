"""A model that thinks, by every API: its thoughts are shown, come back, and the next prompt extends the one before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import types

from offbook.testing import Action, ScriptedServer, scripted_server

THOUGHT = " Box 7, \u00fc?  I look. "
RAW = '{"box":  7}'
SCHEMA: Any = {"type": "object", "properties": {"box": {"type": "integer"}}}
TASK: list[Any] = [{"role": "user", "content": "Where is box 7?"}]


def policy(body: Any) -> Action:
    if body["messages"][-1]["role"] == "tool":
        return Action("On shelf 7.", thought="So it is there.")
    return Action("I look.", (("look_up", RAW), ("look_up", RAW)), THOUGHT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted_server(policy, tmp_path_factory.mktemp("thinking")) as running:
        yield running


def by_chat(url: str, stream: bool) -> list[str]:
    """Two calls, the second with all that the first said; their thoughts, as the client has them."""
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="any")
    function = {"name": "look_up", "description": "d", "parameters": SCHEMA}
    asked: Any = {"model": "default", "tools": [{"type": "function", "function": function}]}

    def said(messages: list[Any]) -> dict[str, Any]:
        if not stream:
            whole = api.chat.completions.create(messages=messages, **asked)
            return whole.choices[0].message.model_dump(exclude_none=True)
        joined: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": ""}
        for chunk in api.chat.completions.create(messages=messages, stream=True, **asked):
            delta = chunk.choices[0].delta.model_dump(exclude_none=True)
            for name in ("content", "reasoning"):
                joined[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                calls = joined.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name, piece in call["function"].items():
                    calls[call["index"]]["function"][name] += piece
        return joined

    first = said(TASK)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "here"} for call in first["tool_calls"]]
    return [first["reasoning"], said([*TASK, first, *results])["reasoning"]]


def by_messages(url: str, stream: bool) -> list[str]:
    api = anthropic.Anthropic(base_url=url, api_key="any")
    tools = [{"name": "look_up", "description": "d", "input_schema": SCHEMA}]

    def said(messages: list[Any]) -> Any:
        asked: Any = {"model": "default", "max_tokens": 2_000, "tools": tools, "messages": messages}
        asked["thinking"] = {"type": "enabled", "budget_tokens": 1_024}
        if not stream:
            return api.messages.create(**asked).content
        with api.messages.stream(**asked) as events:
            return events.get_final_message().content

    first = said(TASK)
    uses = [block for block in first if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "here"} for use in uses]
    second = said([*TASK, {"role": "assistant", "content": first}, {"role": "user", "content": results}])
    return [block.thinking for block in (*first, *second) if block.type == "thinking"]


def by_responses(url: str, stream: bool) -> list[str]:
    api = openai.OpenAI(base_url=f"{url}/v1", api_key="any")
    tools = [{"type": "function", "name": "look_up", "description": "d", "parameters": SCHEMA}]

    def said(items: list[Any]) -> list[Any]:
        asked: Any = {"model": "default", "tools": tools, "input": items}
        if not stream:
            output = api.responses.create(**asked).output
        else:
            with api.responses.stream(**asked) as events:
                output = events.get_final_response().output
        return [item.to_dict() for item in output]

    first = said(TASK)
    calls = [item["call_id"] for item in first if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": name, "output": "here"} for name in calls]
    items = [*first, *said([*TASK, *first, *results])]
    return [item["content"][0]["text"] for item in items if item["type"] == "reasoning"]


def by_gemini(url: str, stream: bool) -> list[str]:
    declared = types.FunctionDeclaration(name="look_up", description="d", parameters_json_schema=SCHEMA)
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        thinking_config=types.ThinkingConfig(include_thoughts=True),
    )
    with genai.Client(api_key="any", http_options=types.HttpOptions(base_url=url)) as api:

        def said(contents: list[Any]) -> list[types.Part]:
            asked: Any = {"model": "default", "contents": contents, "config": config}
            ask: Callable[..., Any] = api.models.generate_content_stream if stream else api.models.generate_content
            answers = list(ask(**asked)) if stream else [ask(**asked)]
            return [part for answer in answers for part in answer.candidates[0].content.parts]

        task = types.Content(role="user", parts=[types.Part(text=TASK[0]["content"])])
        first = said([task])
        results = [
            types.Part(
                function_response=types.FunctionResponse(
                    id=part.function_call.id, name="look_up", response={"result": "here"}
                )
            )
            for part in first
            if part.function_call is not None
        ]
        turns = [task, types.Content(role="model", parts=first), types.Content(role="user", parts=results)]
        second = said(turns)
    return ["".join(part.text or "" for part in parts if part.thought) for parts in (first, second)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_thoughts_survive_both_ways_and_every_api_has_the_same_prompts(server: ScriptedServer, stream: bool) -> None:
    prompts: list[Any] = []
    for by in (by_chat, by_messages, by_responses, by_gemini):
        name = f"{by.__name__}-{stream}"
        assert by(f"{server.url}/t/{name}", stream) == [THOUGHT, "So it is there."], name
        first, second = server.calls(name)
        sampled = [*first.prompt_ids, *first.outputs[0].token_ids]
        assert list(second.prompt_ids[: len(sampled)]) == sampled, name
        turn = second.messages[1]
        assert (turn["reasoning"], turn["content"]) == (THOUGHT, "I look."), name
        assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [RAW, RAW], name
        prompts.append((first.prompt_ids, second.prompt_ids))
    assert all(pair == prompts[0] for pair in prompts)


def test_every_event_of_googles_stream_is_one_of_the_sdks_types(server: ScriptedServer) -> None:
    """Google's types refuse an unknown field; dumped again by their names on the wire, an event is what was sent."""
    declared = {"name": "look_up", "description": "d", "parametersJsonSchema": SCHEMA}
    body = {
        "contents": [{"role": "user", "parts": [{"text": "Where is box 7?"}]}],
        "tools": [{"functionDeclarations": [declared]}],
        "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
    }
    path = "/v1beta/models/default:streamGenerateContent?alt=sse"
    sent = httpx.post(server.url + path, json=body, trust_env=False).text
    bodies = [json.loads(event.removeprefix("data: ")) for event in sent.split("\n\n") if event]
    assert len(bodies) > 2
    kinds = set[str]()
    for value in bodies:
        event = types.GenerateContentResponse.model_validate(value)
        assert event.model_dump(mode="json", by_alias=True, exclude_none=True) == value
        kinds |= {name for part in event.parts or () for name in part.model_dump(exclude_none=True)}
    assert kinds == {"text", "thought", "function_call", "thought_signature"}
    assert bodies[-1]["candidates"][0]["finishReason"] == "STOP" and "usageMetadata" in bodies[-1]
