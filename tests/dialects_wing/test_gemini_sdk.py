"""Google's SDK on a real server with the embedded engine: what is recorded, counted and rendered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from openai import AsyncOpenAI

from offbook import LocalBackend
from offbook.base.types import Call, new_id
from offbook.client.connection.http import Api

SCHEMA = {"type": "object", "properties": {"box": {"type": "string"}}, "required": ["box"]}
TOOL = {"name": "box_size", "description": "The size of a box.", "parameters": SCHEMA}
CHAT: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "what is the size of box 4821? \u00e9\u4e2d\U0001f600"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "box_size", "arguments": f'{{"box": "{name}"}}'}}
            for name in ("one", "two")
        ],
    },
    {"role": "tool", "tool_call_id": "one", "content": "7"},
    {"role": "tool", "tool_call_id": "two", "content": '{"error": "no such box"}'},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "and now?"},
]


@pytest.fixture
async def api(local_backend: LocalBackend) -> Api:
    return await local_backend.connect("tiny")


@pytest.fixture
def rollout() -> str:
    return new_id("traj")


@pytest.fixture
async def client(api: Api, rollout: str) -> AsyncIterator[genai.Client]:
    options = types.HttpOptions(base_url=f"{api.url}/t/{rollout}")
    with genai.Client(api_key=api.key or "unused", http_options=options) as client:
        yield client
        await client.aio.aclose()


async def recorded(api: Api, rollout: str) -> tuple[Call, ...]:
    return (await api.trajectory(rollout)).calls


def as_contents() -> list[types.Content]:
    """The conversation as Google has it, calls without ids."""
    contents: list[types.Content] = []
    for message in CHAT[1:]:
        parts = [types.Part(text=message["content"])] if message["role"] != "tool" else []
        for call in message.get("tool_calls", ()):
            parts.append(types.Part.from_function_call(name="box_size", args={"box": call["id"]}))
        if message["role"] == "tool":
            text = message["content"]
            response = {"error": "no such box"} if "error" in text else {"result": text}
            parts.append(types.Part.from_function_response(name="box_size", response=response))
        contents.append(types.Content(role="model" if message["role"] == "assistant" else "user", parts=parts))
    return contents


async def test_a_conversation_is_the_same_prompt_in_googles_form(api: Api, client: genai.Client, rollout: str) -> None:
    async with AsyncOpenAI(base_url=f"{api.url}/t/{rollout}/v1", api_key=api.key) as chat:
        tools: Any = [{"type": "function", "function": TOOL}]
        await chat.chat.completions.create(model="tiny", messages=CHAT, tools=tools, max_tokens=4)
    declared = types.FunctionDeclaration(
        name=TOOL["name"], description=TOOL["description"], parameters_json_schema=SCHEMA
    )
    config = types.GenerateContentConfig(
        system_instruction="Be brief.", tools=[types.Tool(function_declarations=[declared])], max_output_tokens=4
    )
    await client.aio.models.generate_content(model="tiny", contents=as_contents(), config=config)  # type: ignore[arg-type]
    by_chat, by_google = await recorded(api, rollout)
    assert by_chat.prompt_ids == by_google.prompt_ids
    assert by_chat.messages[1]["content"] == by_google.messages[1]["content"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_of_the_engine_is_recorded(
    api: Api, client: genai.Client, rollout: str, streamed: bool
) -> None:
    config = types.GenerateContentConfig(max_output_tokens=24, top_k=64, temperature=0.7, seed=3)
    ask: Any = {"model": "tiny", "contents": "Where is order 17?", "config": config}
    counted = await client.aio.models.count_tokens(model="tiny", contents="Where is order 17?")
    if streamed:
        answers = [answer async for answer in await client.aio.models.generate_content_stream(**ask)]
    else:
        answers = [await client.aio.models.generate_content(**ask)]
    (call,) = await recorded(api, rollout)
    assert "".join(answer.text or "" for answer in answers) == (call.outputs[0].message["content"] or "")
    usage = answers[-1].usage_metadata
    assert usage is not None and usage.candidates_token_count == len(call.outputs[0].token_ids)
    assert counted.total_tokens == usage.prompt_token_count == len(call.prompt_ids)
    assert (call.sampling.top_k, call.sampling.temperature) == (64, 0.7)


async def test_a_limit_beyond_the_context_is_fitted_and_a_prompt_beyond_it_refused(client: genai.Client) -> None:
    config = types.GenerateContentConfig(max_output_tokens=1_000_000, stop_sequences=["e"])
    answer = await client.aio.models.generate_content(model="tiny", contents="hello", config=config)
    assert answer.candidates is not None and answer.candidates[0].finish_reason is not None
    with pytest.raises(errors.ClientError, match="context") as refused:
        await client.aio.models.generate_content(model="tiny", contents="box " * 100_000)
    assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
