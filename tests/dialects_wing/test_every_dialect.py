"""What every API does alike: retries, disconnects, a full disk, a sampler that dies, mutated requests."""

from __future__ import annotations

import asyncio
import copy
import json
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from offbook.base.types import CallStatus
from tests.fakes.gateway import Gateway
from tests.fakes.scripted_sampler import ScriptedCompletion
from tests.server.http.test_openai_api import DEADLINE, until_recorded


@dataclass(frozen=True)
class Api:
    """`asked`: the body of a request with a text. `ended`, `failed`: what only a complete or a broken stream has."""

    name: str
    path: str
    asked: Callable[[str], dict[str, Any]]
    ended: str
    failed: str
    streamed: str | None = None  # the path of a stream, where no field of the body asks for it

    def request(self, text: str = "hi", *, stream: bool) -> tuple[str, dict[str, Any]]:
        if not stream:
            return f"/t/t1{self.path}", self.asked(text)
        if self.streamed is not None:
            return f"/t/t1{self.streamed}", self.asked(text)
        return f"/t/t1{self.path}", self.asked(text) | {"stream": True}


def _chat(text: str) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 64, "messages": [{"role": "user", "content": text}]}


APIS = (
    Api("chat", "/v1/chat/completions", _chat, '"finish_reason":"stop"', '"error":{'),
    Api("messages", "/v1/messages", _chat, "message_stop", "event: error"),
    Api(
        "responses",
        "/v1/responses",
        lambda text: {"model": "default", "input": text},
        "response.completed",
        "response.failed",
    ),
    Api(
        "gemini",
        "/v1beta/models/default:generateContent",
        lambda text: {"contents": [{"role": "user", "parts": [{"text": text}]}]},
        '"finishReason"',
        '"error":{',
        "/v1beta/models/default:streamGenerateContent?alt=sse",
    ),
    Api(
        "completions",
        "/v1/completions",
        lambda text: {"model": "default", "prompt": text},
        '"finish_reason":"stop"',
        '"error":{',
    ),
)
EACH = pytest.mark.parametrize("api", APIS, ids=[api.name for api in APIS])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def refused(api: Api, body: Any) -> str:
    """The message of an error that has the API's form."""
    error = body["error"]
    if api.name == "messages":
        assert body.keys() == {"type", "error"} and error.keys() == {"type", "message"}
    elif api.name == "gemini":
        assert {"code", "message", "status"} <= error.keys() <= {"code", "message", "status", "details"}
    else:
        assert error.keys() == {"message", "type", "param", "code"}
    return error["message"]


@EACH
@STREAMED
async def test_a_repeated_key_gets_the_recorded_answer_and_waits_for_a_running_call(
    gateway: Gateway, api: Api, stream: bool
) -> None:
    gate = asyncio.Event()
    gateway.sampler.completions.append(ScriptedCompletion(gates={0: gate}))
    path, body = api.request(stream=stream)
    headers = {"idempotency-key": "k"}
    both = [asyncio.create_task(gateway.http.post(path, json=body, headers=headers)) for _ in range(2)]
    await gateway.sampler.arrived.acquire()
    gate.set()
    answers = [await one for one in both]
    [call] = await gateway.calls("t1")
    assert len(gateway.sampler.received) == 1
    assert {answer.headers["x-offbook-call"] for answer in answers} == {call.id}
    for answer in answers:
        assert "lo" in answer.text and (not stream or api.ended in answer.text)
    path, body = api.request("other", stream=stream)
    other = await gateway.http.post(path, json=body, headers=headers)
    assert other.status_code == 409 and "'k'" in refused(api, other.json())


@EACH
async def test_a_client_that_vanishes_mid_stream_leaves_what_came(gateway: Gateway, api: Api) -> None:
    gateway.sampler.completions.append(ScriptedCompletion(gates={1: asyncio.Event()}))
    path, body = api.request(stream=True)
    async with gateway.http.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            if "Hel" in line:
                break
    await asyncio.wait_for(gateway.sampler.abandoned.acquire(), DEADLINE)
    (call,) = await until_recorded(gateway, "t1")
    assert (call.status, call.outputs[0].token_ids) == (CallStatus.CANCELLED, (11, 12))


@EACH
async def test_a_client_that_vanishes_while_it_waits_is_recorded(gateway: Gateway, api: Api) -> None:
    gateway.sampler.completions.append(ScriptedCompletion(gates={0: asyncio.Event()}))
    path, body = api.request(stream=False)
    waiting = asyncio.create_task(gateway.http.post(path, json=body))
    await gateway.sampler.arrived.acquire()
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    await asyncio.wait_for(gateway.sampler.abandoned.acquire(), DEADLINE)
    (call,) = await until_recorded(gateway, "t1")
    assert (call.status, call.outputs) == (CallStatus.CANCELLED, ())


@EACH
async def test_a_sampler_that_dies_mid_stream_ends_it_as_failed(gateway: Gateway, api: Api) -> None:
    gateway.sampler.completions.append(ScriptedCompletion(dies_after=1))
    path, body = api.request(stream=True)
    answer = await gateway.http.post(path, json=body)
    assert "Hel" in answer.text and api.failed in answer.text and api.ended not in answer.text
    (call,) = await gateway.calls("t1")
    assert (call.status, call.outputs[0].token_ids) == (CallStatus.FAILED, (11, 12))
    assert call.error is not None and "connection to the sampler broke" in call.error


@EACH
async def test_a_sampler_that_dies_before_its_answer_is_a_502(gateway: Gateway, api: Api) -> None:
    gateway.sampler.completions.extend([ScriptedCompletion(dies_after=0)] * 2)
    path, body = api.request(stream=False)
    answer = await gateway.http.post(path, json=body)
    assert answer.status_code == 502 and "tried twice" in refused(api, answer.json())
    assert [call.status for call in await gateway.calls("t1")] == [CallStatus.FAILED]


@EACH
@STREAMED
async def test_a_full_disk_is_an_error_and_never_looks_recorded(gateway: Gateway, api: Api, stream: bool) -> None:
    path, body = api.request("x" * 500_000, stream=stream)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        answer = await gateway.http.post(path, json=body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "no space left" in answer.text
    if stream:
        assert api.failed in answer.text and api.ended not in answer.text
    else:
        assert answer.status_code == 507 and refused(api, answer.json())
    assert await gateway.calls("t1") == ()


ODD: list[Any] = [None, True, -1, 1e300, 2**70, "", "x", "\ud800", [], {}, [[]], [{}], {"type": "text"}, {"id": "a"}]
LONG: dict[str, Any] = {
    "messages": {
        "model": "default",
        "max_tokens": 64,
        "system": [{"type": "text", "text": "g"}],
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "b", "signature": "c"},
                    {"type": "tool_use", "id": "d", "name": "f", "input": {"e": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "d", "content": "h"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1},
    },
    "responses": {
        "model": "default",
        "instructions": "g",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
            {"type": "function_call", "call_id": "d", "name": "f", "arguments": '{"e": 1}'},
            {"type": "function_call_output", "call_id": "d", "output": "h"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "f"},
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
        "include": ["reasoning.encrypted_content"],
    },
    "gemini": {
        "systemInstruction": {"parts": [{"text": "g"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "a"}]},
            {"role": "model", "parts": [{"text": "b", "thought": True}, {"functionCall": {"name": "f", "args": {}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"result": "h"}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": {"type": "object"}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"temperature": 1, "thinkingConfig": {"thinkingBudget": 1}},
    },
    "completions": {"model": "default", "prompt": "a", "max_tokens": 4, "logprobs": 1, "stop": ["b"], "seed": 1},
}


def mutated(value: Any, dice: Random) -> None:
    """Replace, remove or repeat one value somewhere inside."""
    while True:
        key = dice.choice(list(value) if isinstance(value, dict) else range(len(value)))
        inside = value[key]
        if not (isinstance(inside, dict | list) and inside) or dice.random() < 0.3:
            break
        value = inside
    match dice.randrange(4):
        case 0:
            del value[key]
        case 1 if isinstance(value, list):
            value.append(copy.deepcopy(inside))
        case _:
            value[key] = copy.deepcopy(dice.choice(ODD))


async def mutations(gateway: Gateway, api: Api, count: int, seed: int) -> set[int]:
    """The statuses of so many mutated requests, whole and streamed. None may be of the server, and every call that was
    answered is in the records, once."""
    dice, statuses, answered = Random(seed), set[int](), list[str]()
    for number in range(count):
        path, _ = api.request(stream=bool(number % 2))
        body = json.loads(json.dumps(LONG[api.name]))
        if number % 2 and api.streamed is None:
            body["stream"] = True
        for _ in range(dice.randint(1, 3)):
            if body:
                mutated(body, dice)
        sent = json.dumps(body).encode()
        answer = await gateway.http.post(path, content=sent, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (sent, answer.text)
        assert answer.status_code == 200 or refused(api, answer.json())
        assert answer.status_code != 200 or api.failed not in answer.text, (sent, answer.text)
        statuses.add(answer.status_code)
        if answer.status_code == 200:
            answered.append(answer.headers["x-offbook-call"])
    recorded = {call.id: call for call in await gateway.calls("t1")}
    assert len(set(answered)) == len(answered) and set(answered) <= recorded.keys()
    assert all(recorded[name].status is CallStatus.COMPLETE for name in answered)
    return statuses


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
@pytest.mark.parametrize("api", APIS[1:], ids=[api.name for api in APIS[1:]])
async def test_a_mutated_request_is_never_an_error_of_the_server(gateway: Gateway, api: Api) -> None:
    assert {200, 400} <= await mutations(gateway, api, 60, seed=1)


@pytest.mark.slow("1,000 requests")
@pytest.mark.parametrize("api", APIS[1:], ids=[api.name for api in APIS[1:]])
async def test_a_thousand_mutated_requests(gateway: Gateway, api: Api) -> None:
    assert {200, 400} <= await mutations(gateway, api, 250, seed=2)
