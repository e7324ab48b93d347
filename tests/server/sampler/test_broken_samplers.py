"""Samplers that break off, blink or answer nonsense: every call ends with the reason, and what came is recorded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from offbook.base.errors import ConfigError, EngineError
from offbook.base.server_options import EngineOptions
from offbook.base.types import CallStatus
from offbook.server.sampler import running_sampler
from offbook.server.sampler.engine_choice import choose
from offbook.server.sampler.pool import SamplerPool
from offbook.server.sampler.running_sampler import RunningSampler
from offbook.server.sampler.supervised import SupervisedSampler
from tests.fakes.gateway import Gateway, gateway_over
from tests.fakes.scripted_sampler import ScriptedChoice, ScriptedCompletion, ScriptedSampler, scripted_sampler

T1 = {"x-offbook-trajectory": "t1"}
CALL: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
HEAD = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
WORD = {"index": 0, "delta": {"content": "tok"}, "finish_reason": None, "token_ids": [7], "logprobs": None}
LAST = {**WORD, "finish_reason": "stop"}

Write = Callable[[asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with scripted_sampler() as scripted, gateway_over(scripted, tmp_path) as found:
        yield found


@asynccontextmanager
async def wired(folder: Path, *pieces: bytes) -> AsyncIterator[Gateway]:
    """A server over a sampler that sends these bytes for every call, and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with gateway_over(ScriptedSampler(url=f"http://127.0.0.1:{port}"), folder) as found:
            yield found


def event(*choices: Any, **fields: Any) -> bytes:
    return b"data: " + json.dumps({"id": "c", "object": "x", "choices": choices} | fields).encode() + b"\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def told(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@asynccontextmanager
async def running(*scripted: ScriptedSampler) -> AsyncIterator[SupervisedSampler | SamplerPool]:
    members = [RunningSampler(each.url) for each in scripted]
    client = members[0] if len(members) == 1 else SamplerPool(members)
    client.start()
    try:
        yield client
    finally:
        await client.stop()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_sampler, "POLL_SECONDS", 0.05)


# ---- on the wire


async def test_a_stream_whose_encoding_breaks_ends_with_an_error_and_keeps_what_came(tmp_path: Path) -> None:
    start = OK + b"transfer-encoding: chunked\r\n\r\n" + chunked(event(HEAD, prompt_token_ids=[1]) + event(WORD))
    async with wired(tmp_path, start, b"ZZZ\r\nhello\r\n") as gateway, asyncio.timeout(10):
        answer = await gateway.chat(T1, stream=True)
        assert "broke" in told(answer.text)[-1]["error"]["message"]
        (call,) = await gateway.calls("t1")
        assert (call.status, call.outputs[0].token_ids) == (CallStatus.FAILED, (7,))


async def test_an_answer_in_transit_ends_when_the_connections_to_the_sampler_are_given_up(tmp_path: Path) -> None:
    async with scripted_sampler() as scripted, gateway_over(scripted, tmp_path) as gateway, asyncio.timeout(10):
        scripted.completions.append(ScriptedCompletion(gates={1: asyncio.Event()}))
        body = {"model": "default", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body, headers=T1) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            await gateway.services.sampler._disconnect()  # type: ignore[attr-defined]
            rest = [line async for line in lines]
        assert "error" in told("\n".join(rest))[-1]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (event(HEAD, prompt_token_ids=[1]) + event(WORD), "choices of 1, not all of them finished"),
        (b": nothing\n\n", "choices of 1, not all of them finished"),
        (event(HEAD, prompt_token_ids=[1]) + event("x"), "not of vLLM's dialect"),
        (event(HEAD, prompt_token_ids=[1]) + event(WORD) + b"data: {broken\n\n", "not JSON"),
    ],
)
async def test_a_stream_that_is_cut_or_senseless_is_never_shown_as_whole(
    tmp_path: Path, body: bytes, reason: str, recorded: bool
) -> None:
    async with wired(tmp_path, OK + b"connection: close\r\n\r\n" + body + b"data: [DONE]\n\n") as gateway:
        answer = await gateway.chat(T1 if recorded else {}, stream=True)
        shown = told(answer.text) or [answer.json()]
        assert reason in shown[-1]["error"]["message"]
        assert not recorded or [call.status for call in await gateway.calls("t1")] == [CallStatus.FAILED]
        if b"broken" in body:  # what came before it is shown, and recorded
            assert shown[1]["choices"][0]["delta"]["content"] == "tok"
            assert not recorded or (await gateway.calls("t1"))[0].outputs[0].token_ids == (7,)


async def test_lines_that_say_nothing_are_passed_over(tmp_path: Path) -> None:
    body = b"data:\n\n" + event(HEAD, prompt_token_ids=[1]) + b"data: \r\n\r\n" + event(LAST) + b"data: [DONE]\n\n"
    async with wired(tmp_path, OK + b"connection: close\r\n\r\n" + body) as gateway:
        assert told((await gateway.chat(T1, stream=True)).text)[-1]["choices"][0]["finish_reason"] == "stop"
        assert [call.status for call in await gateway.calls("t1")] == [CallStatus.COMPLETE]


async def test_redirects_are_refused_with_their_place(tmp_path: Path) -> None:
    reply = b"HTTP/1.1 307 Over there\r\nlocation: http://127.0.0.1:9/v1/chat/completions\r\ncontent-length: 0\r\n\r\n"
    async with wired(tmp_path, reply) as gateway:
        for stream in (False, True):
            answer = await gateway.chat(T1, stream=stream)
            assert answer.status_code == 502 and "a redirect to 'http://127.0.0.1:9/" in answer.text


@pytest.mark.parametrize("token", ["token_id:1", 2**31, -1])
async def test_ids_that_are_none_are_refused_and_the_call_is_recorded_as_failed(gateway: Gateway, token: Any) -> None:
    gateway.sampler.completions.append(ScriptedCompletion((ScriptedChoice(token_ids=((token,), (2,))),)))
    answer = await gateway.chat(T1)
    assert answer.status_code == 502 and "token ids are integers" in answer.text
    (call,) = await gateway.calls("t1")
    assert call.status == CallStatus.FAILED


async def test_an_answer_of_no_shape_that_can_be_kept_leaves_a_failed_call(gateway: Gateway) -> None:
    gateway.sampler.completions.append(ScriptedCompletion((ScriptedChoice(finish_reason=5),)))  # type: ignore[arg-type]
    answer = await gateway.chat(T1)
    assert answer.status_code == 502 and "finish_reason is a string" in answer.text
    (call,) = await gateway.calls("t1")
    assert (call.status, call.outputs[0].finish_reason) == (CallStatus.FAILED, None)


async def test_a_stream_that_has_begun_is_not_asked_for_again_without_its_length(gateway: Gateway) -> None:
    error = {"message": "too long", "param": "max_tokens", "code": 400}
    gateway.sampler.completions.append(ScriptedCompletion(dies_after=1, error=error))
    answer = await gateway.chat(T1 | {"x-offbook-length": "fit"}, stream=True, max_tokens=99)
    assert told(answer.text)[-1]["error"]["message"] == "too long" and len(gateway.sampler.received) == 1


# ---- vLLM servers that run already


async def test_a_broken_call_beside_a_blink_of_health_does_not_leave_it_starting_for_ever() -> None:
    async with scripted_sampler() as scripted, running(scripted) as client, asyncio.timeout(20):
        await client.ready()
        scripted.healthy = False
        scripted.completions.append(ScriptedCompletion(dies_after=0))
        call = asyncio.create_task(client.calls.post(CALL))
        while client.state == "ok":
            await asyncio.sleep(0.005)
        scripted.healthy = True
        assert (await call).status == 200 and client.state == "ok"


async def test_one_missed_health_check_is_no_end_and_three_are(monkeypatch: pytest.MonkeyPatch) -> None:
    misses = 0

    async def healthy(client: object) -> bool:
        nonlocal misses
        misses -= 1
        return misses < 0

    async with scripted_sampler() as scripted, running(scripted) as client, asyncio.timeout(20):
        await client.ready()
        monkeypatch.setattr(running_sampler, "healthy", healthy)
        for missed, restarts in ((2, 0), (4, 1)):
            misses = missed
            while misses > -3:
                await asyncio.sleep(0.01)
            assert client.restarts == restarts


async def test_calls_that_run_outlive_a_blink() -> None:
    gate = asyncio.Event()
    async with scripted_sampler() as scripted, running(scripted) as client, asyncio.timeout(20):
        await client.ready()
        scripted.completions.append(ScriptedCompletion(gates={0: gate}))
        call = asyncio.create_task(client.calls.post(CALL))
        await scripted.arrived.acquire()
        scripted.healthy = False
        while client.state == "ok":
            await asyncio.sleep(0.01)
        scripted.healthy = True
        await client.ready()
        gate.set()
        assert (await call).status == 200 and len(scripted.received) == 1


async def test_a_call_of_one_that_is_gone_goes_to_another_without_waiting_for_it() -> None:
    hung_up = asyncio.Event()
    choice = {"token_ids": [7], "logprobs": {"content": [{"logprob": 0.0}]}}
    answers = {
        b"GET /v1/models": {"data": [{"id": "base"}]},
        b"POST /v1/chat": {"prompt_token_ids": [1], "choices": [choice]},
    }

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hangs up on whatever comes after the call that proves it at the start."""
        asked = await reader.readuntil(b"\r\n\r\n")
        body = json.dumps(next((answer for path, answer in answers.items() if asked.startswith(path)), {})).encode()
        if not hung_up.is_set():
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, scripted_sampler() as two:
        one = ScriptedSampler(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for stream in (True, False):
            hung_up.clear()
            async with running(one, two) as client, asyncio.timeout(10):
                await asyncio.gather(*(member.ready() for member in client.members))  # type: ignore[union-attr]
                hung_up.set()
                if stream:
                    async with client.calls.stream(CALL | {"stream": True}) as response:
                        assert b"[DONE]" in await response.read()
                else:
                    assert (await client.calls.post(CALL)).status == 200


@pytest.mark.parametrize("listed", ['{"data": []}', '{"data": ["base"]}', '{"data": [{}]}', "<html>", "[]"])
async def test_one_that_names_no_model_is_refused_with_what_it_said(listed: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = listed.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with running(ScriptedSampler(url=url)) as client, asyncio.timeout(10):
            with pytest.raises(EngineError, match="cannot be used: GET /v1/models names no base model"):
                await client.ready()


async def test_a_start_that_fails_in_a_way_that_nobody_foresaw_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(SupervisedSampler):
        async def _launch(self) -> None:
            raise ZeroDivisionError("odd")

    client = Odd()
    client.start()
    async with asyncio.timeout(10):
        with pytest.raises(EngineError, match="could not be started: ZeroDivisionError: odd"):
            await client.ready()
    await client.stop()
    assert "Traceback" in caplog.text


# ---- options


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://:80", "http://[::1", "http://a:1;http://b:2", "ftp://a"],
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="a server's URL is such as http://"):
        EngineOptions.parse(vllm_url=url)


def test_urls_are_plain_different_and_at_least_one() -> None:
    assert EngineOptions.parse(vllm_url="http://a:1/v1/, https://b/prefix/").vllm_url == (
        "http://a:1",
        "https://b/prefix",
    )
    for given, message in (
        ("http://a:1,http://a:1/v1", "given more than once: http://a:1"),
        ("http://me:secret@a:1", "the key is taken from VLLM_API_KEY"),
        (" , ", "nothing is in the list"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineOptions.parse(vllm_url=given)


def test_options_that_would_have_no_effect_are_refused() -> None:
    for options, message in (
        ({"engine": "embedded", "engine_args": {"a": 1}}, "engine_args: only vLLM has this option"),
        ({"vllm_url": "http://a:1", "max_model_len": 512}, "max_model_len: set it on the command line of the vLLM"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineOptions.parse(**options)


def test_an_automatic_engine_says_which_options_it_has_no_use_for(caplog: pytest.LogCaptureFixture) -> None:
    assert choose(EngineOptions.parse(device="cpu", max_lora_rank=64), "tiny", trains=True).name == "embedded"
    assert "max_lora_rank: ignored by the embedded engine" in caplog.text


def test_a_key_that_cannot_be_sent_is_named_and_an_empty_one_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions.parse(vllm_url="http://a:1")
    monkeypatch.setenv("VLLM_API_KEY", "sekr\u00e9t")
    with pytest.raises(ConfigError, match="VLLM_API_KEY: a key must be printable ASCII"):
        choose(options, "tiny", trains=True)
    monkeypatch.setenv("VLLM_API_KEY", " \n")
    assert running_sampler.key() is None and choose(options, "tiny", trains=True).name == "vllm"
