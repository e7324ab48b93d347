"""Completions of a prompt at the gateway, over the real engine: OpenAI's SDK, and LangChain's `OpenAI`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from langchain_openai import OpenAI as LangChainOpenAI
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from offbook import LocalBackend
from offbook.base.types import Call, CallStatus, new_id
from offbook.client.connection.http import Api

PROMPT = "one, two, three,"


@pytest.fixture
async def api(local_backend: LocalBackend) -> Api:
    return await local_backend.connect("tiny")


@pytest.fixture
async def complete(api: Api) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """OpenAI's `completions.create`, under a trajectory."""
    async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key=api.key, max_retries=0) as client:

        async def create(rollout: str, **fields: Any) -> Any:
            at = client.with_options(base_url=f"{api.url}/t/{rollout}/v1")
            return await at.completions.create(**{"model": "tiny", "prompt": PROMPT, **fields})

        yield create


async def recorded(api: Api, rollout: str) -> Call:
    (call,) = (await api.trajectory(rollout)).calls
    return call


async def test_a_prompt_is_continued_and_recorded_with_what_was_sampled(api: Api, complete: Any) -> None:
    rollout = new_id("traj")
    fields: Any = {"extra_body": {"return_token_ids": True, "top_k": 20, "ignore_eos": True}}
    answer = await complete(
        rollout, model="tiny", prompt=PROMPT, max_tokens=12, n=2, logprobs=2, temperature=0.7, **fields
    )
    call = await recorded(api, rollout)
    assert call.messages == ({"role": "prompt", "content": PROMPT},)
    assert (call.sampling.temperature, call.sampling.top_k, call.status) == (0.7, 20, CallStatus.TRUNCATED)
    for choice, output in zip(answer.choices, call.outputs, strict=True):
        extra: Any = choice.model_extra
        assert (tuple(extra["token_ids"]), tuple(extra["prompt_token_ids"])) == (output.token_ids, call.prompt_ids)
        assert choice.text == output.message["content"] and choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(output.logprobs)
        assert extra["offbook"]["call_id"] == call.id


async def test_token_ids_are_the_prompt_as_they_stand(api: Api, complete: Any) -> None:
    texts, prompts = set[str](), set[tuple[int, ...]]()
    ids: Any = None
    for _ in range(2):
        rollout = new_id("traj")
        answer = await complete(rollout, model="tiny", prompt=ids or PROMPT, seed=1)
        call = await recorded(api, rollout)
        ids = list(call.prompt_ids)
        texts.add(answer.choices[0].text)
        prompts.add(call.prompt_ids)
    assert len(texts) == len(prompts) == 1
    assert call.messages == ({"role": "prompt", "content": f"{len(ids)} token ids", "token_ids": ids},)


async def test_a_stream_is_recorded_as_it_was_sent(api: Api, complete: Any) -> None:
    rollout = new_id("traj")
    options: Any = {"include_usage": True}
    stream = await complete(
        rollout, model="tiny", prompt=PROMPT, max_tokens=40, stream=True, stream_options=options, logprobs=0
    )
    chunks = [chunk async for chunk in stream]
    call = await recorded(api, rollout)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == call.outputs[0].message["content"]
    logprobs = [
        value for chunk in chunks for c in chunk.choices if c.logprobs for value in c.logprobs.token_logprobs or ()
    ]
    assert logprobs == pytest.approx(call.outputs[0].logprobs)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(call.outputs[0].token_ids)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_repeated_idempotency_key_gives_the_same_text(api: Api, complete: Any, streamed: bool) -> None:
    rollout = new_id("traj")
    texts: list[str] = []
    for prompt in (PROMPT, PROMPT, [1, 2]):
        headers = {"idempotency-key": rollout}
        request: Any = {"model": "tiny", "prompt": prompt, "extra_headers": headers, "stream": streamed, "logprobs": 0}
        if prompt == [1, 2]:
            with pytest.raises(Exception, match="other messages"):
                await complete(rollout, **request)
            continue
        answer: Any = await complete(rollout, **request)
        chunks = [chunk async for chunk in answer] if streamed else [answer]
        texts.append("".join(choice.text for chunk in chunks for choice in chunk.choices))
    assert texts[0] == texts[1] == (await recorded(api, rollout)).outputs[0].message["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": "box " * 100_000}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"extra_body": {"tools": []}}, "tools"),
        ({"extra_body": {"top_logprobs": 1}}, "top_logprobs"),
        ({"extra_body": {"surprise": 1}}, "surprise"),
        ({"max_tokens": 10**6}, "max_tokens"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(complete: Any, fields: dict[str, Any], param: str) -> None:
    request: Any = {"model": "tiny", "prompt": PROMPT} | fields
    with pytest.raises(BadRequestError) as refused:
        await complete(new_id("traj"), **request)
    assert refused.value.param == param


async def test_a_model_that_is_not_there_is_named(api: Api, complete: Any) -> None:
    with pytest.raises(NotFoundError, match="nope"):
        await complete(new_id("traj"), model="nope", prompt=PROMPT)


@pytest.mark.parametrize("streamed", [False, True])
async def test_langchains_completion_model_is_recorded(api: Api, complete: Any, streamed: bool) -> None:
    rollout = new_id("traj")
    async with httpx.AsyncClient() as http:
        url = f"{api.url}/t/{rollout}/v1"
        key: Any = api.key
        model = LangChainOpenAI(model="tiny", base_url=url, api_key=key, max_tokens=12, http_async_client=http)
        text = "".join([piece async for piece in model.astream(PROMPT)]) if streamed else await model.ainvoke(PROMPT)
    call = await recorded(api, rollout)
    assert text == call.outputs[0].message["content"] and call.messages[0]["content"] == PROMPT
