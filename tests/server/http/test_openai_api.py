"""The OpenAI-compatible endpoint: what it accepts, what it answers, and that nothing leaves before it is recorded."""

from __future__ import annotations

import asyncio
import json
import resource
from contextlib import suppress
from dataclasses import replace
from math import nan
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError

from offbook.base.types import Call, CallOutput, CallStatus
from offbook.base.wire import (
    IDEMPOTENCY_HEADER,
    LENGTH_HEADER,
    ORIGIN_HEADER,
    RECORD_HEADER,
    TRAJECTORY_HEADER,
)
from offbook.server.http.app import UnexpectedErrors
from offbook.server.http.openai_api import ModelCalls
from tests.fakes.gateway import Gateway
from tests.fakes.scripted_sampler import ScriptedChoice, ScriptedCompletion

T1 = {TRAJECTORY_HEADER: "t1"}
DEADLINE = 10.0


async def until_recorded(gateway: Gateway, trajectory_id: str, count: int = 1) -> tuple[Call, ...]:
    """The calls of a trajectory, once there are `count`."""
    async with asyncio.timeout(DEADLINE):
        while len(calls := await gateway.calls(trajectory_id)) < count:
            await asyncio.sleep(0.01)
    return calls


def events(response: httpx.Response) -> list[Any]:
    """The JSON events of a stream; the last line must be [DONE]."""
    lines = [line[6:] for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def sdk(gateway: Gateway, path: str = "/v1", headers: dict[str, str] | None = None) -> AsyncOpenAI:
    """The real client, over the gateway's own connections."""
    client = AsyncOpenAI(base_url=gateway.url + path, api_key="none", http_client=gateway.http, max_retries=0)
    return client.with_options(default_headers=headers or {})


# ---- recording


async def test_a_whole_answer_is_recorded_with_the_engines_own_ids(gateway: Gateway) -> None:
    response = await gateway.chat(T1, temperature=0.7, top_p=0.9, top_k=-1, tools=[tool("f")])
    assert response.status_code == 200, response.text
    answer = response.json()
    (call,) = await gateway.calls("t1")
    assert call.prompt_ids == (1, 2, 3)
    assert call.outputs[0].token_ids == (11, 12, 13)
    assert call.outputs[0].logprobs == pytest.approx((-0.1, -0.2, -0.3))
    assert call.outputs[0].message == {"role": "assistant", "content": "Hello"}
    assert (call.status, call.model, call.step, call.constrained) == (CallStatus.COMPLETE, "default", 0, None)
    assert call.first_token_at is None
    assert call.sampling.model_dump() == {"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.0}
    assert (call.messages, call.tools) == (({"role": "user", "content": "hi"},), (tool("f"),))
    mark = {"trajectory_id": "t1", "call_id": call.id, "index": 0, "step": 0}
    assert answer["choices"][0]["offbook"] == mark
    assert (response.headers["x-offbook-call"], response.headers[TRAJECTORY_HEADER]) == (call.id, "t1")
    assert answer["model"] == "default"
    assert "prompt_token_ids" not in answer and "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


async def test_a_streamed_answer_is_recorded_with_the_same_ids_before_its_finishing_chunk(gateway: Gateway) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    text = ""
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=T1) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "prompt_token_ids" not in chunk and chunk["model"] == "default"
            (choice,) = chunk["choices"]
            assert "token_ids" not in choice and choice["logprobs"] is None
            text += choice["delta"].get("content") or ""
            if choice["finish_reason"] is not None:
                (call,) = await gateway.calls("t1")
                assert choice["offbook"] == {"trajectory_id": "t1", "call_id": call.id, "index": 0, "step": 0}
    assert text == "Hello" == call.outputs[0].message["content"]
    assert call.first_token_at is not None and call.started_at <= call.first_token_at <= call.ended_at
    assert (call.prompt_ids, call.outputs[0].token_ids) == ((1, 2, 3), (11, 12, 13))
    assert call.outputs[0].logprobs == pytest.approx((-0.1, -0.2, -0.3))
    assert response.headers["x-offbook-call"] == call.id


async def test_a_call_that_names_no_trajectory_is_answered_and_not_recorded(gateway: Gateway) -> None:
    for stream in (False, True):
        response = await gateway.chat(stream=stream)
        assert response.status_code == 200
        assert "offbook" not in response.text and "x-offbook-call" not in response.headers
        assert "return_token_ids" not in gateway.sampler.received[-1]


@pytest.mark.parametrize(
    ("headers", "path", "fields"),
    [
        (T1, "/v1", {}),
        ({}, "/t/t1/v1", {}),
        ({}, "/v1", {"offbook": {"trajectory_id": "t1"}}),
        (T1, "/t/t1/v1", {"offbook": {"trajectory_id": "t1"}}),
    ],
)
async def test_a_trajectory_is_named_by_header_url_or_body(
    gateway: Gateway, headers: dict[str, str], path: str, fields: dict[str, Any]
) -> None:
    assert (await gateway.chat(headers, path, **fields)).status_code == 200
    assert len(await gateway.calls("t1")) == 1
    assert "offbook" not in gateway.sampler.received[0]


async def test_two_trajectories_in_one_call_are_refused_with_both_names(gateway: Gateway) -> None:
    response = await gateway.chat(T1, "/t/t2/v1")
    assert response.status_code == 400
    assert "'t1'" in response.text and "'t2'" in response.text
    assert gateway.sampler.received == []


async def test_asking_to_be_recorded_opens_a_trajectory_for_each_call(gateway: Gateway) -> None:
    answers = [(await gateway.chat({RECORD_HEADER: "1"})).json() for _ in range(2)]
    marks = [answer["choices"][0]["offbook"] for answer in answers]
    assert marks[0]["trajectory_id"] != marks[1]["trajectory_id"]
    for mark in marks:
        (call,) = await gateway.calls(mark["trajectory_id"])
        assert call.id == mark["call_id"]


async def test_several_choices_are_one_call_each_with_its_mark(gateway: Gateway) -> None:
    turn = ScriptedCompletion((ScriptedChoice(), ScriptedChoice(("No",), ((21,),), ((-1.0,),), "length")))
    gateway.sampler.completions.extend([turn, turn])
    whole = (await gateway.chat(T1, n=2)).json()
    streamed = events(await gateway.chat({TRAJECTORY_HEADER: "t2"}, n=2, stream=True))
    finishing = [item for chunk in streamed for item in chunk["choices"] if item["finish_reason"]]
    for trajectory_id, choices in (("t1", whole["choices"]), ("t2", sorted(finishing, key=lambda item: item["index"]))):
        (call,) = await gateway.calls(trajectory_id)
        assert [output.token_ids for output in call.outputs] == [(11, 12, 13), (21,)]
        assert [output.status for output in call.outputs] == [CallStatus.COMPLETE, CallStatus.TRUNCATED]
        assert call.status == CallStatus.TRUNCATED
        assert [item["offbook"]["index"] for item in choices] == [0, 1]


async def test_what_a_client_drops_is_recorded_all_the_same(gateway: Gateway) -> None:
    raw = '{"b": 1,\n "a": "\\u00e9"}'
    choice = ScriptedChoice(
        pieces=(raw[:5], raw[5:]),
        token_ids=((5,), (6, 7)),
        logprobs=((-1.0,), (-2.0, -3.0)),
        finish_reason="tool_calls",
    )
    turn = ScriptedCompletion((ScriptedChoice((raw,), ((5, 6, 7),), ((-1.0, -2.0, -3.0),), "tool_calls", ("f", raw)),))
    gateway.sampler.completions.extend([turn, ScriptedCompletion((replace(choice, tool_call=("f", raw)),))])
    await sdk(gateway, headers=T1).chat.completions.create(model="default", messages=[{"role": "user", "content": "x"}])
    stream = await sdk(gateway, headers=T1).chat.completions.create(
        model="default", messages=[{"role": "user", "content": "x"}], stream=True
    )
    arguments = [
        part.function.arguments
        async for chunk in stream
        for part in (chunk.choices[0].delta.tool_calls or [])
        if part.function is not None
    ]
    assert "".join(part or "" for part in arguments) == raw
    for call in await gateway.calls("t1"):
        (recorded,) = call.outputs[0].message["tool_calls"]
        assert recorded == {"id": "call-7", "type": "function", "function": {"name": "f", "arguments": raw}}
        assert call.outputs[0].token_ids == (5, 6, 7)
        assert call.status == CallStatus.COMPLETE


async def test_missing_logprobs_are_nan_at_their_place_and_never_shifted(gateway: Gateway) -> None:
    short = ScriptedChoice(("a", "b"), ((1, 2), (3, 4)), ((None, -0.5), (-0.25, None)))
    sentinel = ScriptedChoice(("a",), ((1, 2),), ((-9999.0, -0.5),))
    gateway.sampler.completions.extend(
        [
            ScriptedCompletion((short,)),
            ScriptedCompletion((sentinel,)),
            ScriptedCompletion(omit=frozenset({"logprobs"})),
        ]
    )
    for stream in (True, False, False):
        assert (await gateway.chat(T1, stream=stream)).status_code == 200
    logprobs = [call.outputs[0].logprobs for call in await gateway.calls("t1")]
    assert logprobs == [(nan, -0.5, -0.25, nan), (nan, -0.5), (nan, nan, nan)]
    shown = (await gateway.http.get("/api/trajectories/t1")).json()["calls"]  # valid JSON, which has no NaN
    outputs = [json.loads(json.dumps(call), parse_constant=pytest.fail)["outputs"][0] for call in shown]
    assert [output["logprobs"][0] for output in outputs] == [None, None, None]
    assert [CallOutput.model_validate(output).logprobs for output in outputs] == logprobs


async def test_truncated_answers_are_recorded_alike_streamed_or_not(gateway: Gateway) -> None:
    cut = ScriptedChoice(('{"a": ', '"b'), ((1,), (2,)), ((-1.0,), (-2.0,)), "length", ("f", '{"a": "b'))
    gateway.sampler.completions.extend([ScriptedCompletion((cut,)), ScriptedCompletion((cut,))])
    for stream in (False, True):
        await gateway.chat(T1, stream=stream, max_tokens=2)
    for call in await gateway.calls("t1"):
        assert call.status == call.outputs[0].status == CallStatus.TRUNCATED
        assert call.outputs[0].message["tool_calls"][0]["function"]["arguments"] == '{"a": "b'
        assert call.outputs[0].token_ids == (1, 2)


async def test_a_client_that_goes_away_within_its_body_is_no_fault_and_gets_nothing() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/t/t1/v1/chat/completions", "headers": []}
    await UnexpectedErrors(ModelCalls(None, None))(scope, receive, send)  # type: ignore[arg-type]
    assert sent == []


async def test_calls_after_the_trajectory_was_finished_are_answered_and_recorded_as_late(gateway: Gateway) -> None:
    await gateway.chat(T1)
    record = {"id": "t1", "model": "default", "reward": 1.0, "started_at": 0.0, "ended_at": 1.0}
    assert (await gateway.http.post("/api/trajectories", json={"trajectories": [record]})).json() == {
        "calls": {"t1": 1}
    }
    assert (await gateway.chat(T1)).status_code == 200
    assert [call.late for call in await gateway.calls("t1")] == [False, True]


async def test_side_calls_under_another_trajectory_stay_out(gateway: Gateway) -> None:
    await gateway.chat(T1)
    await gateway.chat({TRAJECTORY_HEADER: "title"})
    await gateway.chat()
    assert len(await gateway.calls("t1")) == 1


async def test_every_call_says_the_step_it_began_with(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    gateway.sampler.completions.append(ScriptedCompletion(gates={0: gate}))
    first = asyncio.create_task(gateway.chat(T1))
    await gateway.sampler.arrived.acquire()
    models = gateway.services.models
    route = models.registry.resolve("default")
    newer = type(route)("default", 1, "default@1")
    monkeypatch.setattr(models.registry, "resolve", lambda name: newer)
    monkeypatch.setattr(models.leases, "_ensure_loaded", lambda route: asyncio.sleep(0))
    second = await gateway.chat(T1)
    gate.set()
    assert (await first).json()["choices"][0]["offbook"]["step"] == 0
    assert second.json()["choices"][0]["offbook"]["step"] == 1
    assert [call.step for call in await gateway.calls("t1")] == [0, 1]
    assert [body["model"] for body in gateway.sampler.received] == ["base", "default@1"]


async def test_the_origin_of_a_call_is_kept(gateway: Gateway) -> None:
    await gateway.chat(T1 | {ORIGIN_HEADER: '{"node": "agent", "step": 2, "tags": ["a"]}'})
    (call,) = await gateway.calls("t1")
    assert call.origin is not None and (call.origin.node, call.origin.step, call.origin.tags) == ("agent", 2, ("a",))
    bad = await gateway.chat(T1 | {ORIGIN_HEADER: '{"knot": 1}'})
    assert bad.status_code == 400 and "knot" in bad.text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_for_another_model_becomes_the_room_of_the_context(gateway: Gateway, stream: bool) -> None:
    refusal = {"error": {"message": "lower max_tokens to 9", "param": "max_tokens", "code": 400}}
    gateway.sampler.completions.append(ScriptedCompletion(status=400, error=refusal))
    fitting = await gateway.chat(T1 | {LENGTH_HEADER: "fit"}, max_tokens=64_000, stream=stream)
    assert fitting.status_code == 200, fitting.text
    first, second = gateway.sampler.received
    assert first["max_tokens"] == 64_000 and "max_tokens" not in second
    assert [call.status for call in await gateway.calls("t1")] == [CallStatus.COMPLETE]
    gateway.sampler.completions.append(ScriptedCompletion(status=400, error=refusal))
    assert (await gateway.chat(T1, max_tokens=64_000)).status_code == 400
    wrong = await gateway.chat(T1 | {LENGTH_HEADER: "cut"})
    assert wrong.status_code == 400 and LENGTH_HEADER in wrong.text


async def test_a_temperature_that_engines_take_as_greedy_is_recorded_as_greedy(gateway: Gateway) -> None:
    await gateway.chat(T1, temperature=1e-8)
    (call,) = await gateway.calls("t1")
    assert call.sampling.temperature == gateway.sampler.received[0]["temperature"] == 0.0


async def test_every_sampling_default_is_spelled_out_to_the_sampler(gateway: Gateway) -> None:
    await gateway.chat(T1)
    await gateway.chat(temperature=0, min_p=0.1, repetition_penalty=1.2, store=True, user="u", metadata={"a": "b"})
    first, second = gateway.sampler.received
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert {name: first[name] for name in settings} == settings
    assert (first["return_token_ids"], first["logprobs"], first["top_logprobs"]) == (True, True, 0)
    assert (second["temperature"], second["min_p"], second["repetition_penalty"]) == (0.0, 0.1, 1.2)
    assert not {"store", "user", "metadata"} & second.keys()


async def test_ids_and_logprobs_are_shown_to_those_who_ask(gateway: Gateway) -> None:
    asked = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2}
    answer = (await gateway.chat(T1, **asked)).json()
    assert answer["prompt_token_ids"] == [1, 2, 3]
    assert answer["choices"][0]["token_ids"] == [11, 12, 13]
    assert len(answer["choices"][0]["logprobs"]["content"]) == 3
    assert gateway.sampler.received[0]["top_logprobs"] == 2
    chunks = events(await gateway.chat(T1, stream=True, stream_options={"include_usage": True}, **asked))
    assert chunks[0]["prompt_token_ids"] == [1, 2, 3]
    assert [token for chunk in chunks for item in chunk["choices"] for token in item.get("token_ids", [])] == [
        11,
        12,
        13,
    ]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 3


CONSTRAINED: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"tool_choice": "auto"}, None),
    ({"tool_choice": "none"}, None),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {}}, None),
    ({"logit_bias": {"5": 1.0}}, "logit_bias"),
    ({"frequency_penalty": 0}, None),
    ({"presence_penalty": 0.5, "bad_words": ["x"]}, "bad_words, presence_penalty"),
    ({"repetition_penalty": 1.0, "min_tokens": 0}, None),
    ({"min_tokens": 2}, "min_tokens"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"guided_choice": ["a"]}, "guided_choice"),
    ({"seed": 3, "stop": ["x"], "temperature": 0.5, "top_p": 0.5, "top_k": 5}, None),
]


async def test_a_constrained_call_says_why(gateway: Gateway) -> None:
    for at, (fields, reason) in enumerate(CONSTRAINED):
        response = await gateway.chat({TRAJECTORY_HEADER: f"t{at}"}, tools=[tool("f")], **fields)
        assert response.status_code == 200, response.text
        (call,) = await gateway.calls(f"t{at}")
        assert (call.constrained and ", ".join(sorted(call.constrained.split(", ")))) == reason, fields


async def test_guided_fields_of_earlier_versions_reach_the_engine_as_it_takes_them_today(gateway: Gateway) -> None:
    cases: list[dict[str, Any]] = [{"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}]
    for at, fields in enumerate(cases):
        assert (await gateway.chat({TRAJECTORY_HEADER: f"guided-{at}"}, **fields)).status_code == 200
        sent = gateway.sampler.received[-1]
        assert sent["structured_outputs"] == {"choice": ["a", "b"]} and "guided_choice" not in sent
        (call,) = await gateway.calls(f"guided-{at}")
        assert call.allowed_texts == ("a", "b")
    assert (await gateway.chat(T1, guided_choice=["a", "b"], frequency_penalty=1)).status_code == 200
    (call,) = await gateway.calls(T1[TRAJECTORY_HEADER])
    assert call.allowed_texts == ()  # the penalty changes the distribution too


# ---- the same call twice


async def test_a_repeated_idempotency_key_gets_the_recorded_answer(gateway: Gateway) -> None:
    headers = T1 | {IDEMPOTENCY_HEADER: "key-1"}
    first = (await gateway.chat(headers)).json()
    again = (await gateway.chat(headers, logprobs=True, return_token_ids=True)).json()
    assert again["choices"][0]["offbook"] == first["choices"][0]["offbook"]
    assert again["choices"][0]["message"]["content"] == "Hello"
    assert (again["prompt_token_ids"], again["choices"][0]["token_ids"]) == ([1, 2, 3], [11, 12, 13])
    assert [item["logprob"] for item in again["choices"][0]["logprobs"]["content"]] == pytest.approx([-0.1, -0.2, -0.3])
    assert again["usage"] == first["usage"]
    chunks = events(await gateway.chat(headers, stream=True, stream_options={"include_usage": True}))
    assert "".join(item["delta"].get("content") or "" for chunk in chunks for item in chunk["choices"]) == "Hello"
    assert chunks[1]["choices"][0]["offbook"] == first["choices"][0]["offbook"]
    assert chunks[-1]["usage"] == first["usage"]
    assert len(gateway.sampler.received) == 1
    other = (await gateway.chat({TRAJECTORY_HEADER: "t2", IDEMPOTENCY_HEADER: "key-1"})).json()
    assert other["choices"][0]["offbook"]["call_id"] != first["choices"][0]["offbook"]["call_id"]


async def test_a_retry_waits_for_the_call_that_still_runs(gateway: Gateway) -> None:
    gate = asyncio.Event()
    gateway.sampler.completions.append(ScriptedCompletion(gates={0: gate}))
    headers = {RECORD_HEADER: "1", IDEMPOTENCY_HEADER: "key-1"}
    both = [asyncio.create_task(gateway.chat(headers)) for _ in range(2)]
    await gateway.sampler.arrived.acquire()
    gate.set()
    marks = [(await one).json()["choices"][0]["offbook"] for one in both]
    assert marks[0] == marks[1]
    assert len(gateway.sampler.received) == 1


async def test_a_retry_after_a_failure_is_sampled_anew(gateway: Gateway) -> None:
    gateway.sampler.completions.append(ScriptedCompletion(status=500, error={"error": {"message": "boom"}}))
    headers = T1 | {IDEMPOTENCY_HEADER: "key-1"}
    assert (await gateway.chat(headers)).status_code == 502
    assert (await gateway.chat(headers)).status_code == 200
    assert [call.status for call in await gateway.calls("t1")] == [CallStatus.FAILED, CallStatus.COMPLETE]


async def test_equal_calls_without_a_key_are_sampled_and_recorded_each(gateway: Gateway) -> None:
    await asyncio.gather(*(gateway.chat(T1 | {"x-stainless-retry-count": "1"}) for _ in range(8)))
    assert len(await gateway.calls("t1")) == len(gateway.sampler.received) == 8


async def test_a_key_used_for_other_messages_is_refused(gateway: Gateway) -> None:
    headers = T1 | {IDEMPOTENCY_HEADER: "key-1"}
    await gateway.chat(headers)
    response = await gateway.chat(headers, messages=[{"role": "user", "content": "other"}])
    assert response.status_code == 409 and "'key-1'" in response.text


# ---- what goes wrong


async def test_a_client_that_vanishes_mid_stream_frees_the_engine_and_leaves_what_came(gateway: Gateway) -> None:
    gateway.sampler.completions.append(ScriptedCompletion(gates={1: asyncio.Event()}))
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=T1) as response:
        async for line in response.aiter_lines():
            if "Hel" in line:
                break
    await asyncio.wait_for(gateway.sampler.abandoned.acquire(), DEADLINE)
    (call,) = await until_recorded(gateway, "t1")
    assert (call.status, call.outputs[0].status) == (CallStatus.CANCELLED, CallStatus.CANCELLED)
    assert (call.prompt_ids, call.outputs[0].token_ids) == ((1, 2, 3), (11, 12))
    assert call.outputs[0].message["content"] == "Hel"


async def test_an_engine_that_dies_mid_stream_is_an_error_event_and_a_failed_call(gateway: Gateway) -> None:
    gateway.sampler.completions.append(ScriptedCompletion(dies_after=1))
    chunks = events(await gateway.chat(T1, stream=True))
    assert chunks[-1]["error"]["code"] == "engine_failed" and "sampler" in chunks[-1]["error"]["message"]
    (call,) = await gateway.calls("t1")
    assert (call.status, call.outputs[0].status) == (CallStatus.FAILED, CallStatus.FAILED)
    assert call.outputs[0].token_ids == (11, 12)
    assert call.error is not None and "connection to the sampler broke" in call.error


async def test_an_error_event_of_the_engine_reaches_the_openai_client(gateway: Gateway) -> None:
    gateway.sampler.completions.append(
        ScriptedCompletion(dies_after=1, error={"message": "out of blocks", "code": 500})
    )
    stream = await sdk(gateway, headers=T1).chat.completions.create(
        model="default", messages=[{"role": "user", "content": "x"}], stream=True
    )
    with pytest.raises(APIError, match="out of blocks"):
        async for _ in stream:
            continue
    assert [call.status for call in await gateway.calls("t1")] == [CallStatus.FAILED]


async def test_an_engine_that_dies_before_its_answer_is_a_502_and_a_failed_call(gateway: Gateway) -> None:
    gateway.sampler.completions.extend([ScriptedCompletion(dies_after=0), ScriptedCompletion(dies_after=0)])
    response = await gateway.chat(T1)
    assert response.status_code == 502 and "tried twice" in response.json()["error"]["message"]
    (call,) = await gateway.calls("t1")
    assert (call.status, call.outputs) == (CallStatus.FAILED, ())


@pytest.mark.parametrize("omitted", ["prompt_token_ids", "token_ids"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_ids_is_an_error_that_names_the_field(
    gateway: Gateway, omitted: str, stream: bool
) -> None:
    gateway.sampler.completions.append(ScriptedCompletion(omit=frozenset({omitted})))
    response = await gateway.chat(T1, stream=stream)
    assert omitted in response.text and "return_token_ids" in response.text
    if stream:
        chunks = events(response)
        assert chunks[-1]["error"]["code"] == "engine_failed"
        assert all(item["finish_reason"] is None for chunk in chunks[:-1] for item in chunk["choices"])
    else:
        assert response.status_code == 502
    assert [call.status for call in await gateway.calls("t1")] == [CallStatus.FAILED]


async def test_a_stream_that_ends_without_a_finish_reason_is_a_failed_call(gateway: Gateway) -> None:
    gateway.sampler.completions.append(ScriptedCompletion((ScriptedChoice(finish_reason=None),)))
    chunks = events(await gateway.chat(T1, stream=True))
    assert "ended after" in chunks[-1]["error"]["message"]
    assert [call.status for call in await gateway.calls("t1")] == [CallStatus.FAILED]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_fault_found_by_the_engine_stays_the_clients(gateway: Gateway, stream: bool) -> None:
    error = {"error": {"message": "the prompt has 9000 tokens", "param": "messages", "code": 400}}
    gateway.sampler.completions.append(ScriptedCompletion(status=400, error=error))
    response = await gateway.chat(T1, stream=stream)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    (call,) = await gateway.calls("t1")
    assert (call.status, call.error) == (CallStatus.FAILED, "the prompt has 9000 tokens")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("param", ["input_tokens", "input_text"])
async def test_a_prompt_that_vllm_finds_too_long_has_openais_code(gateway: Gateway, stream: bool, param: str) -> None:
    """vLLM 0.32 names the field so, and has no code of its own."""
    message = "This model's maximum context length is 512 tokens. However, your prompt contains 600 input tokens."
    refusal = {"error": {"message": message, "type": "BadRequestError", "param": param, "code": 400}}
    gateway.sampler.completions.append(ScriptedCompletion(status=400, error=refusal))
    with pytest.raises(BadRequestError, match="maximum context length is 512") as caught:
        await sdk(gateway).chat.completions.create(
            model="default", messages=[{"role": "user", "content": "hi"}], stream=stream
        )
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_cannot_be_recorded_is_an_error_and_never_looks_recorded(
    gateway: Gateway, stream: bool
) -> None:
    long = "x" * 500_000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        response = await gateway.chat(T1, stream=stream, messages=[{"role": "user", "content": long}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "records.db" in response.text and "no space left" in response.text
    if stream:
        assert all(item["finish_reason"] is None for chunk in events(response)[:-1] for item in chunk["choices"])
    else:
        assert response.status_code == 507
    assert await gateway.calls("t1") == ()
    assert (await gateway.chat(T1)).status_code == 200


# ---- refusals


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_only_the_allowed_tools_reach_the_policy(gateway: Gateway) -> None:
    offered = [tool("f"), tool("g") | {"function": tool("g")["function"] | {"strict": True}}, tool("h")]
    for mode in ("auto", "required"):
        response = await gateway.chat(T1, tools=offered, tool_choice=allowed(mode, "h", "f"))
        assert response.status_code == 200, response.text
        sent = gateway.sampler.received[-1]
        assert (sent["tools"], sent["tool_choice"]) == ([tool("f"), tool("h")], mode)
    free, forced = await gateway.calls("t1")
    assert free.tools == forced.tools == (tool("f"), tool("h"))
    assert (free.constrained, forced.constrained) == (None, "tool_choice")


async def test_an_allowed_tool_that_is_not_offered_is_refused_by_name(gateway: Gateway) -> None:
    for offered in ([tool("f")], None):
        response = await gateway.chat(tools=offered, tool_choice=allowed("auto", "f", "nowhere"))
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "tool_choice")
        assert "'nowhere'" in error["message"]
    assert (await gateway.chat(tools=[tool("f")], tool_choice=allowed("none", "f"))).status_code == 400
    assert (await gateway.chat(tools=[tool("f")], tool_choice=allowed("auto"))).status_code == 400


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "usr", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content.str"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"temprature": 1}, "temprature"),
    ({"functions": []}, "functions"),
    ({"offbook": {"trajectory": "t"}}, "offbook.trajectory_id"),
    ({"offbook": "t"}, "offbook"),
    ({"model": "nope"}, "model"),
]


async def test_a_bad_request_is_refused_with_the_fields_name(gateway: Gateway) -> None:
    for fields, param in REFUSED:
        response = await gateway.chat(T1, **fields)
        error = response.json()["error"]
        assert response.status_code == (404 if param == "model" else 400), fields
        assert error["param"] == param
        assert param.split(".")[0] in error["message"]
        assert error["type"] == ("not_found_error" if param == "model" else "invalid_request_error")
    assert gateway.sampler.received == []
    assert await gateway.calls("t1") == ()


async def test_a_misspelt_field_is_refused_with_the_right_spelling(gateway: Gateway) -> None:
    assert "did you mean 'temperature'?" in (await gateway.chat(temprature=1)).text
    assert "did you mean" not in (await gateway.chat(foo=1)).text


async def test_a_body_that_is_no_json_object_is_refused(gateway: Gateway) -> None:
    for raw in (b"", b"{", b"[1]", b"\xff", b'{"model": NaN}', b'{"model": "\\ud800"}'):
        response = await gateway.http.post(
            "/v1/chat/completions", content=raw, headers={"content-type": "application/json"}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json"), raw


async def test_bad_headers_are_refused(gateway: Gateway) -> None:
    for headers in ({RECORD_HEADER: "yes"}, {TRAJECTORY_HEADER: "x" * 300}, T1 | {IDEMPOTENCY_HEADER: "k" * 400}):
        assert (await gateway.chat(headers)).status_code == 400


async def test_all_known_fields_of_openai_and_vllm_are_accepted(gateway: Gateway) -> None:
    fields = {
        "store": False,
        "metadata": {"a": "b"},
        "user": "u",
        "service_tier": "auto",
        "parallel_tool_calls": False,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "stream": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "modalities": ["text"],
        "stop": "x",
        "seed": 1,
        "max_completion_tokens": 5,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "prompt_cache_key": "k",
        "temperature": None,
        "tools": None,
    }
    assert (await gateway.chat(T1, **fields)).status_code == 200
    sent = gateway.sampler.received[0]
    assert sent["stream_options"] == {"include_usage": True}
    assert sent["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
    assert (sent["parallel_tool_calls"], sent["ignore_eos"], sent["temperature"]) == (False, True, 1.0)


# ---- models


async def test_models_are_listed_and_found_by_name(gateway: Gateway) -> None:
    client = sdk(gateway, "/t/t1/v1")
    assert [model.id async for model in await client.models.list()] == ["default", "default@0", "tiny"]
    assert (await client.models.retrieve("default")).id == "default"
    with pytest.raises(NotFoundError, match="nope"):
        await client.models.retrieve("nope")
    with pytest.raises(BadRequestError):
        await client.chat.completions.create(model="default", messages=[])


async def test_a_base_model_is_called_by_its_own_name_and_recorded_only_when_asked(gateway: Gateway) -> None:
    hello: list[Any] = [{"role": "user", "content": "hi"}]
    answer = await sdk(gateway).chat.completions.create(model="tiny", messages=hello)
    assert (answer.model, gateway.sampler.received[-1]["model"]) == ("tiny", "base")
    assert "offbook" not in answer.choices[0].model_dump()
    answer = await sdk(gateway, headers=T1).chat.completions.create(model="tiny", messages=hello)
    (call,) = await gateway.calls("t1")
    assert (call.model, call.step) == ("tiny", 0)
    assert answer.choices[0].model_dump()["offbook"]["call_id"] == call.id
    assert (await sdk(gateway).models.retrieve("tiny")).id == "tiny"


async def test_a_slash_behind_the_path_changes_nothing(gateway: Gateway) -> None:
    body = {"model": "default", "messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/chat/completions/", "/t/t1/v1/chat/completions/"):
        assert (await gateway.http.post(path, json=body)).status_code == 200
    assert len(await gateway.calls("t1")) == 1


async def test_clients_that_vanish_at_any_moment_leave_no_lease_and_no_unrecorded_call(gateway: Gateway) -> None:
    async def one(at: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(0.004 * (at % 20)):
                await gateway.chat(T1, stream=bool(at % 2))

    await asyncio.gather(*(one(at) for at in range(60)))
    async with asyncio.timeout(DEADLINE):
        await gateway.services.recorder.drain(DEADLINE)
    calls = await gateway.calls("t1")
    assert len(calls) >= len(gateway.sampler.received)
    assert {call.status for call in calls} <= {CallStatus.COMPLETE, CallStatus.CANCELLED}
    assert not any(gateway.services.models.leases._in_use.values())  # the leases show no count of their own
