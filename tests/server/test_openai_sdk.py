"""What OpenAI's own client gets of a real server with the embedded engine: names, errors and fields of newer versions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from offbook import LocalBackend

HELLO: list[Any] = [{"role": "user", "content": "Where is order 17?"}]


def tool(name: str) -> Any:
    parameters = {"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def allowed(mode: str, name: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}}]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS = [tool("find_order"), tool("cancel_order")]


@pytest.fixture
async def client(local_backend: LocalBackend) -> AsyncIterator[AsyncOpenAI]:
    api = await local_backend.connect("tiny")
    async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key=api.key, max_retries=0) as client:
        yield client


async def test_the_base_is_listed_and_called_by_its_own_name(client: AsyncOpenAI) -> None:
    assert "tiny" in [model.id async for model in client.models.list()]
    answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8)
    assert answer.model == "tiny" and answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "box " * 9_000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "box " * 100_000}]}, "messages"),
        ({"messages": HELLO, "max_tokens": 1_000_000}, "max_tokens"),
    ],
)
async def test_what_exceeds_the_context_has_openais_code(
    client: AsyncOpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", stream=stream, **fields)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


async def test_of_the_allowed_tools_one_is_called(client: AsyncOpenAI) -> None:
    for name in ("find_order", "cancel_order"):
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, tools=TOOLS, tool_choice=allowed("required", name), max_tokens=64, n=4
        )
        calls = [call for choice in answer.choices for call in choice.message.tool_calls or ()]
        assert {call.function.name for call in calls if call.type == "function"} == {name}


async def test_a_tool_that_is_not_allowed_is_not_shown_to_the_policy(client: AsyncOpenAI) -> None:
    async def prompt(**fields: Any) -> list[int]:
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=1, extra_body={"return_token_ids": True}, **fields
        )
        return answer.model_dump()["prompt_token_ids"]

    narrowed = await prompt(tools=TOOLS, tool_choice=allowed("auto", "find_order"))
    assert narrowed == await prompt(tools=TOOLS[:1]) != await prompt(tools=TOOLS)


async def test_thinking_options_do_not_stop_a_program_on_a_base_that_does_not_think(client: AsyncOpenAI) -> None:
    async def prompt(**extra: Any) -> list[int]:
        asked = {"return_token_ids": True, **extra}
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1, extra_body=asked)
        return answer.model_dump()["prompt_token_ids"]

    options: Any = {
        "reasoning_effort": "low",
        "reasoning": {"effort": "high", "exclude": True},
        "thinking": {"type": "enabled", "budget_tokens": 99},
        "enable_thinking": True,
        "thinking_budget": 99,
        "thinking_token_budget": 99,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert await prompt(**options) == await prompt(reasoning_effort="a provider's own word") == await prompt()


async def test_16_stop_strings_end_an_answer(client: AsyncOpenAI) -> None:
    stops = [f"never {number}" for number in range(15)]
    whole = (await client.chat.completions.create(model="tiny", messages=HELLO, temperature=0)).choices[0]
    text = whole.message.content or ""
    end = text[len(text) // 2 :][:3]
    answer = await client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, stop=[*stops, end])
    assert text and answer.choices[0].message.content == text[: text.index(end)]
