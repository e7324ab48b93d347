"""Answers of the sampler that do not fit their request: a failed call that names the fault, and nothing to train on."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from offbook.base.types import CallStatus
from offbook.base.wire import Health
from offbook.server.calls import chat_exchange
from offbook.server.sampler import transport
from tests.fakes.gateway import Gateway, gateway_over
from tests.fakes.scripted_sampler import ScriptedSampler

T1 = {"x-offbook-trajectory": "t1"}
SAYS = {"role": "assistant", "content": "hi"}


def choice(index: Any = 0, **fields: Any) -> dict[str, Any]:
    logprobs = {"content": [{"logprob": -0.5}, {"logprob": -0.1}]}
    return {
        "index": index,
        "message": SAYS,
        "finish_reason": "stop",
        "token_ids": [5, 6],
        "logprobs": logprobs,
    } | fields


def delta(index: Any = 0, **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": {"content": "a"}, "finish_reason": None, "token_ids": [5]} | fields


def answer(*choices: dict[str, Any]) -> bytes:
    return json.dumps({"prompt_token_ids": [1, 2], "choices": list(choices)}).encode()


def events(*chunks: dict[str, Any]) -> bytes:
    head = {"prompt_token_ids": [1, 2], "choices": []}
    lines = [b"data: " + json.dumps(each).encode() for each in (head, *({"choices": [chunk]} for chunk in chunks))]
    return b"\n\n".join([*lines, b"data: [DONE]", b""])


class Wire:
    """A sampler that sends these bytes for every call; `asked` counts them."""

    def __init__(self) -> None:
        self.pieces: tuple[bytes, ...] = ()
        self.headers = b""
        self.asked = 0
        self.hangs = False
        self.let_go = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n" + self.headers + b"\r\n")
        try:
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
            if self.hangs:
                await self.let_go.wait()
        except ConnectionError:
            return  # the gateway hung up, as it should
        writer.close()


@pytest.fixture
async def wire() -> Wire:
    return Wire()


@pytest.fixture
async def gateway(wire: Wire, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with over(wire, tmp_path) as made:
        yield made


@asynccontextmanager
async def over(wire: Wire, folder: Path) -> AsyncIterator[Gateway]:
    async with await asyncio.start_server(wire.serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with gateway_over(ScriptedSampler(url=url), folder) as made:
            yield made
        wire.let_go.set()


def messages_of(text: str) -> str:
    return text.replace("\\", "")


WRONG: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "an index twice": ([choice(0), choice(0)], {"n": 2}, "choice 0 twice"),
    "five choices for one": ([choice(at) for at in range(5)], {}, "index 1 although n is 1"),
    "an index beyond the database": ([choice(2**63)], {}, "the index 9223372036854775808"),
    "a negative index": ([choice(-1)], {}, "the index -1"),
    "an index that is text": ([choice("0")], {}, "the index 0"),
    "a choice too few": ([choice(0)], {"n": 2}, "1 choices of 2"),
    "a logprob above 0": ([choice(logprobs={"content": [{"logprob": 0.5}, {"logprob": -1}]})], {}, "a logprob above 0"),
    "a logprob too few": ([choice(logprobs={"content": [{"logprob": -1}]})], {}, "1 logprobs for 2 tokens"),
    "a logprob too many": ([choice(token_ids=[5])], {}, "2 logprobs for 1 tokens"),
    "more tokens than asked for": ([choice()], {"max_tokens": 1}, "2 tokens although max_tokens is 1"),
    "a finish reason that is a number": ([choice(finish_reason=5)], {}, "finish_reason is a string"),
    "a finish reason of any length": ([choice(finish_reason="x" * 99)], {}, "finish_reason is a string"),
    "no finish reason": ([choice(finish_reason=None)], {}, "no finish_reason"),
    "a message that is none": ([choice(message="hi")], {}, "not of vLLM's dialect"),
    "a tool call without a name": ([choice(message={"tool_calls": [{"function": {}}]})], {}, "not of vLLM's dialect"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_an_answer_that_does_not_fit_is_a_failed_call_that_names_the_fault(
    gateway: Gateway, wire: Wire, case: str
) -> None:
    choices, fields, fault = WRONG[case]
    wire.pieces = (answer(*choices),)
    refused = await gateway.chat(T1, **fields)
    assert refused.status_code == 502 and fault in messages_of(refused.text)
    (call,) = await gateway.calls("t1")
    assert call.status == CallStatus.FAILED and fault in (call.error or "")
    health = Health.model_validate_json((await gateway.http.get("/health")).content)
    assert health.wrong_answers == wire.asked == 1


STREAMED: dict[str, tuple[bytes, str]] = {
    "an index that was not asked for": (events(delta(1)), "index 1 although n is 1"),
    "an index of 2^70": (events(delta()).replace(b'"index": 0', b'"index": 1180591620717411303424'), "index"),
    "a tool call of index 3,000,000": (events(delta(delta={"tool_calls": [{"index": 3_000_000}]})), "index 3000000"),
    "a tool call of index -1": (events(delta(delta={"tool_calls": [{"index": -1}]})), "index -1"),
    "a logprob above 0": (events(delta(logprobs={"content": [{"logprob": 1.0}]})), "a logprob above 0"),
    "tokens past the end": (events(delta(finish_reason="stop"), delta()), ""),
    "more tokens than asked for": (events(*(delta() for _ in range(4))), "4 tokens although max_tokens is 3"),
    "no end": (events(delta()), "not all of them finished"),
}


@pytest.mark.parametrize("case", STREAMED)
async def test_a_stream_that_does_not_fit_ends_with_the_fault(gateway: Gateway, wire: Wire, case: str) -> None:
    body, fault = STREAMED[case]
    wire.pieces = (body,)
    shown = await gateway.chat(T1, stream=True, max_tokens=3)
    assert '"error"' in shown.text and fault in shown.text
    (call,) = await gateway.calls("t1")
    assert call.status == CallStatus.FAILED or case == "tokens past the end"  # those came after the record
    assert len(call.outputs[0].token_ids if call.outputs else ()) <= 4


async def test_calls_that_are_not_recorded_are_checked_too(gateway: Gateway, wire: Wire) -> None:
    wire.pieces = (answer(choice(0), choice(0)),)
    assert (await gateway.chat(n=2)).status_code == 502
    wire.pieces = (events(delta(5)),)
    assert "index 5" in (await gateway.chat(stream=True)).text


# ---- size


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_end_is_given_up_at_what_was_asked_for_and_asked_for_once(
    gateway: Gateway, wire: Wire, stream: bool
) -> None:
    wire.pieces = (b"data: x" * 100_000,) * 64  # 45 MB without a newline
    refused = await gateway.chat(T1, stream=stream, max_tokens=8)
    assert refused.status_code == 502 and "larger than the 4" in refused.text
    assert wire.asked == 1
    assert [call.status for call in await gateway.calls("t1")] == [CallStatus.FAILED]


async def test_an_answer_that_is_compressed_is_refused_unread(gateway: Gateway, wire: Wire) -> None:
    wire.headers = b"content-encoding: gzip\r\n"
    wire.pieces = (gzip.compress(b" " * 10_000_000),)
    for stream in (False, True):
        refused = await gateway.chat(T1, stream=stream)
        assert refused.status_code == 502 and "encoding 'gzip'" in refused.text


def test_the_limit_follows_the_request() -> None:
    def limit(**fields: Any) -> int:
        usual: dict[str, Any] = {"choices": 1, "tokens": 100, "top_logprobs": 0, "request_bytes": 0, "recorded": True}
        return transport.AnswerLimits.of(**(usual | fields)).bytes

    assert limit() < limit(choices=9) < limit(choices=9, top_logprobs=20) < limit(request_bytes=2**22)
    assert limit(tokens=None, choices=128) == transport.MAX_ANSWER


async def test_a_stream_that_stalls_after_its_last_choice_is_ended(
    gateway: Gateway, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_exchange, "TAIL_SECONDS", 0.05)
    wire.pieces, wire.hangs = (events(delta(finish_reason="stop")).replace(b"data: [DONE]", b""),), True
    async with asyncio.timeout(10):
        shown = await gateway.chat(T1, stream=True)
    assert shown.text.endswith("data: [DONE]\n\n") and '"error"' not in shown.text
    assert [call.status for call in await gateway.calls("t1")] == [CallStatus.COMPLETE]
