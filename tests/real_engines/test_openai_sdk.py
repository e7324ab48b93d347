"""What OpenAI's own client gets of a server with vLLM: names, errors and fields of newer versions, as of the embedded
engine (tests/server/test_openai_sdk.py)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.real_engines.test_vllm import QUESTION, TOOLS
from tests.server.servers import RunningServer

pytestmark = pytest.mark.slow("real vLLM")

OTHER: Any = {"type": "function", "function": TOOLS[0]["function"] | {"name": "cancel_order"}}


@pytest.fixture
async def client(server: RunningServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_the_base_is_called_by_its_own_name(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8)
    assert answer.model == "tiny" and answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [9_000, 1_000_000])
async def test_a_prompt_that_is_too_long_has_openais_code(client: AsyncOpenAI, words: int, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "box " * words}]
    with pytest.raises(BadRequestError) as caught:
        await client.chat.completions.create(model="tiny", messages=messages, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


async def test_of_the_allowed_tools_one_is_called(client: AsyncOpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "cancel_order"}}]
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    answer = await client.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[*TOOLS, OTHER], tool_choice=choice, max_tokens=64, n=4
    )
    calls = [call for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert {call.function.name for call in calls if call.type == "function"} == {"cancel_order"}


async def test_16_stop_strings_end_an_answer(client: AsyncOpenAI) -> None:
    stops = [f"never {number}" for number in range(15)]
    whole = await client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0)
    text = whole.choices[0].message.content or ""
    end = text[len(text) // 2 :][:3]
    answer = await client.chat.completions.create(model="tiny", messages=QUESTION, temperature=0, stop=[*stops, end])
    assert text and answer.choices[0].message.content == text[: text.index(end)]
    with pytest.raises(BadRequestError, match="16"):
        await client.chat.completions.create(model="tiny", messages=QUESTION, stop=[*stops, "a", "b"])
