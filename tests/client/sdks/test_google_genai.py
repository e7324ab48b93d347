"""Clients of Google's API: its SDK, LangChain's chat model and Pydantic AI's, pointed at the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from langchain.agents import create_agent
from langchain_google_genai import ChatGoogleGenerativeAI
from pydantic_ai import Agent
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.providers.google import GoogleProvider

from offbook.base.types import new_id
from offbook.testing import ScriptedServer

from .rollouts import one_branch, recorded, shown

ORDER = "add(a=1, b=2) and add(a=3, b=4) then add(a=5, b=6)"
ANSWER = "the tools said 3, 7, 11"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def google(server: ScriptedServer, rollout: str) -> genai.Client:
    """Google's client, at the URL that names the trajectory."""
    return genai.Client(api_key="unused", http_options=types.HttpOptions(base_url=f"{server.url}/t/{rollout}"))


@pytest.fixture
def rollout() -> str:
    return new_id("traj")


@pytest.fixture
def client(served: ScriptedServer, rollout: str) -> Iterator[genai.Client]:
    with google(served, rollout) as client:
        yield client


@pytest.mark.parametrize("streamed", [False, True])
def test_a_chat_of_googles_sdk_calls_functions(
    served: ScriptedServer, client: genai.Client, rollout: str, streamed: bool
) -> None:
    config = types.GenerateContentConfig(tools=[add], system_instruction="Be brief.", top_k=64)
    chat = client.chats.create(model="default", config=config)
    if streamed:
        chunks = list(chat.send_message_stream(ORDER))
        assert "".join(chunk.text or "" for chunk in chunks) == ANSWER and len(chunks) > 4
        assert {chunk.response_id for chunk in chunks} == {call.id for call in served.calls(rollout)}
    else:
        assert chat.send_message(ORDER).text == ANSWER
    shown(served, "google-genai", "Gemini", recorded(served, rollout, 3))
    assert served.sampler.received[0]["top_k"] == 64
    assert chat.send_message("well done").text == "heard: well done"
    assert one_branch(recorded(served, rollout, 4))


def test_an_answer_has_all_that_googles_types_know(served: ScriptedServer, client: genai.Client, rollout: str) -> None:
    config = types.GenerateContentConfig(candidate_count=2)
    answer = client.models.generate_content(model="default", contents="hello there", config=config)
    (call,) = served.calls(rollout)
    assert [candidate.index for candidate in answer.candidates or ()] == [0, 1]
    assert (answer.text, answer.response_id, answer.model_version) == ("heard: hello there", call.id, "default")
    assert answer.usage_metadata is not None and answer.candidates is not None
    assert answer.usage_metadata.prompt_token_count == len(call.prompt_ids)
    first = answer.candidates[0]
    assert first.finish_reason == types.FinishReason.STOP


def test_an_answer_follows_a_schema(client: genai.Client) -> None:
    schema = {"type": "OBJECT", "properties": {"city": {"type": "STRING"}, "size": {"type": "INTEGER"}}}
    config = types.GenerateContentConfig(response_mime_type="application/json", response_schema=schema)
    answer = client.models.generate_content(model="default", contents="x", config=config)
    assert answer.parsed == {"city": "teal", "size": 7}


def test_a_refusal_is_an_error_of_googles_sdk(client: genai.Client) -> None:
    with pytest.raises(errors.ClientError, match="There is no model 'nope'") as missing:
        client.models.generate_content(model="nope", contents="x")
    assert (missing.value.code, missing.value.status) == (404, "NOT_FOUND")
    search = types.GenerateContentConfig(tools=[types.Tool(google_search=types.GoogleSearch())])
    for send in (client.models.generate_content, client.models.generate_content_stream):
        with pytest.raises(errors.ClientError, match="googleSearch runs at Google") as refused:
            list(send(model="default", contents="x", config=search))
        assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")


def test_an_error_of_the_engine_reaches_the_client(served: ScriptedServer, client: genai.Client) -> None:
    for send in (client.models.generate_content, client.models.generate_content_stream):
        served.sampler.refusals.append((500, "out of order"))
        with pytest.raises(errors.ServerError, match="out of order"):
            list(send(model="default", contents="x"))


def test_tokens_are_counted_as_the_call_has_them(served: ScriptedServer, client: genai.Client, rollout: str) -> None:
    counted = client.models.count_tokens(model="default", contents="how many?").total_tokens
    client.models.generate_content(model="default", contents="how many?")
    (call,) = served.calls(rollout)
    assert counted == len(call.prompt_ids)


@pytest.mark.parametrize("streamed", [False, True])
def test_langchains_google_model_runs_an_agent(served: ScriptedServer, rollout: str, streamed: bool) -> None:
    url: Any = f"{served.url}/t/{rollout}"
    model = ChatGoogleGenerativeAI(model="default", api_key="unused", base_url=url, max_retries=1)
    agent: Any = create_agent(model, [add])
    if streamed:
        pieces = [piece for piece, _ in agent.stream({"messages": [("user", ORDER)]}, stream_mode="messages")]
        assert "".join(piece.text for piece in pieces if piece.type == "AIMessageChunk") == ANSWER
    else:
        assert agent.invoke({"messages": [("user", ORDER)]})["messages"][-1].content == ANSWER
    shown(served, "langchain-google-genai", "Gemini", recorded(served, rollout, 3))


@pytest.mark.parametrize("streamed", [False, True])
async def test_pydantic_ais_google_model_runs_an_agent(
    served: ScriptedServer, client: genai.Client, rollout: str, streamed: bool
) -> None:
    model = GoogleModel("default", provider=GoogleProvider(client=client))
    agent = Agent(model, tools=[add], instructions="Be brief.")
    if streamed:
        async with agent.run_stream(ORDER) as run:
            assert "".join([piece async for piece in run.stream_text(delta=True)]) == ANSWER
    else:
        assert (await agent.run(ORDER)).output == ANSWER
    await client.aio.aclose()
    assert one_branch(recorded(served, rollout, 3))
