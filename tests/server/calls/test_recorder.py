"""The recorder: one turn per idempotency key, and nothing that was begun is lost when the server ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from offbook.base.types import CallStatus, Json
from offbook.base.wire import IDEMPOTENCY_HEADER, RECORD_HEADER, TRAJECTORY_HEADER
from offbook.server.calls.chat_request import ChatRequest
from offbook.server.calls.recorder import OpenCall, Recorder
from offbook.server.calls.sampled_answer import Sampled, SampledChoice, aligned
from offbook.server.records.store import Store
from offbook.server.sampler.transport import Quirks

ANSWER = {
    "prompt_token_ids": [1, 2],
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "a", "reasoning": "because", "tool_calls": [], "refusal": None},
            "finish_reason": "stop",
            "token_ids": [5, 6],
            "logprobs": {"content": [{"logprob": -0.5}, None]},
        }
    ],
}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = await Store.open(tmp_path / "records.db")
    yield opened
    await opened.close()


def a_request(**headers: str) -> ChatRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    return ChatRequest.parse(body, {TRAJECTORY_HEADER: "t1"} | named)


def an_answer() -> Sampled:
    sampled = Sampled()
    sampled.add_answer(ANSWER)
    return sampled


async def test_an_answer_becomes_a_call_with_its_reasoning_and_without_empty_fields(store: Store) -> None:
    kept = await Recorder(store).keep(OpenCall(a_request(), "t1", "m", 4), an_answer())
    assert (await store.calls_of(["t1"]))["t1"] == (kept,)
    assert kept.outputs[0].message == {"role": "assistant", "content": "a", "reasoning": "because"}
    assert (kept.step, kept.status, kept.prompt_ids) == (4, CallStatus.COMPLETE, (1, 2))
    assert (kept.outputs[0].token_ids, kept.outputs[0].logprobs) == ((5, 6), (-0.5, math.nan))
    assert kept.started_at <= kept.ended_at


async def test_an_unknown_finish_reason_is_a_failed_choice(store: Store) -> None:
    sampled = an_answer()
    sampled.choices[0].finish_reason = "abort"
    kept = await Recorder(store).keep(OpenCall(a_request(), "t1", "m", 0), sampled)
    assert kept.status == kept.outputs[0].status == CallStatus.FAILED


def test_streamed_deltas_join_into_the_message_that_was_meant() -> None:
    sampled = Sampled()
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning": "be"},
        {"reasoning": "cause"},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": ": 1}"}},
                {"index": 1, "function": {"arguments": "{}"}},
            ]
        },
    ]
    for delta in deltas:
        sampled.add_chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    assert sampled.choices[0].message == {
        "role": "assistant",
        "content": "",
        "reasoning": "because",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert not sampled.finished()


def test_logprobs_keep_the_place_of_their_token() -> None:
    assert aligned(0, [1, 2], [-1, None]) == [-1.0, math.nan]
    assert aligned(0, [1, 2], []) == [math.nan, math.nan]
    assert aligned(0, [], []) == []
    assert aligned(0, [1, 2], [-9999.0, 0]) == [math.nan, 0.0]


@pytest.mark.parametrize(
    "logprobs",
    [
        {"content": [{"logprob": -1}, None, {"logprob": -9999.0}]},
        {"content": [], "token_logprobs": [-1, None, -9999.0]},
    ],
    ids=["a dict for each", "a plain list"],
)
def test_logprobs_are_read_in_both_shapes(logprobs: dict[str, Json]) -> None:
    choice = SampledChoice(0)
    choice.add_tokens({"token_ids": [4, 5, 6], "logprobs": logprobs})
    assert choice.logprobs == [-1.0, math.nan, math.nan]


async def test_calls_with_one_key_take_turns_and_others_do_not_wait(store: Store) -> None:
    recorder = Recorder(store)
    first, again, other = (a_request(**{IDEMPOTENCY_HEADER: key}) for key in ("k", "k", "z"))
    entered: list[str] = []

    async def take(request: ChatRequest, name: str, leave: asyncio.Event) -> None:
        async with recorder.turn(request):
            entered.append(name)
            await leave.wait()

    leave = asyncio.Event()
    waiting = [
        asyncio.create_task(take(*turn, leave)) for turn in ((first, "first"), (again, "again"), (other, "other"))
    ]
    async with asyncio.timeout(5):
        while len(entered) < 2:
            await asyncio.sleep(0)
        assert entered == ["first", "other"]
        leave.set()
        await asyncio.gather(*waiting)
    assert entered == ["first", "other", "again"]


async def test_the_same_key_opens_the_same_trajectory_and_another_key_another(store: Store) -> None:
    del store
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    ids = [
        ChatRequest.parse(body, {RECORD_HEADER: "1"} | ({IDEMPOTENCY_HEADER: key} if key else {})).trajectory_id
        for key in ("a", "a", "b", None, None)
    ]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


async def test_draining_cancels_what_runs_and_waits_until_it_is_recorded(store: Store) -> None:
    recorder = Recorder(store)
    call = OpenCall(a_request(), "t1", "m", 0)
    running = asyncio.Event()

    async def serve() -> None:
        try:
            running.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await recorder.keep_cancelled(call, an_answer())
            raise

    recorder.run(serve())
    await running.wait()
    await recorder.drain(deadline=0.01)
    (kept,) = (await store.calls_of(["t1"]))["t1"]
    assert (kept.id, kept.status, kept.error) == (call.id, CallStatus.CANCELLED, "the client went away")


STRICT = {"type": "function", "function": {"name": "find", "strict": True}}
LOOSE = {"type": "function", "function": {"name": "find"}}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [LOOSE, STRICT]}, "tools.strict"),
        ({"tools": [LOOSE], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [STRICT], "tool_choice": "none"}, None),
        ({"tools": [LOOSE], "parallel_tool_calls": True}, None),
        ({"parallel_tool_calls": False}, None),
    ],
)
def test_what_vllm_puts_under_a_grammar_without_being_told_to_is_marked_there_and_nowhere_else(
    fields: dict[str, Any], reason: str | None
) -> None:
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    assert ChatRequest.parse(body, {}).constrained is None
    assert ChatRequest.parse(body, {}, quirks=Quirks(grammar_for_strict_tools=True)).constrained == reason


def test_a_seed_is_left_out_where_it_would_end_the_engine() -> None:
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "seed": 7})
    assert ChatRequest.parse(body, {}).payload("base")["seed"] == 7
    assert "seed" not in ChatRequest.parse(body, {}, quirks=Quirks(no_seed=True)).payload("base")


@pytest.mark.parametrize("sent", [{}, {"vllm_xargs": {"mine": 2}}])
def test_vllm_is_asked_for_plain_lists_of_logprobs_unless_the_client_wants_them(sent: dict[str, Json]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **sent}
    vllm = Quirks(flat_logprobs=True)

    def asked(quirks: Quirks, *, recorded: bool = True, **more: Json) -> Json:
        headers = {RECORD_HEADER: "1"} if recorded else {}
        return ChatRequest.parse(orjson.dumps(body | more), headers, quirks=quirks).payload("base").get("vllm_xargs")

    own = sent.get("vllm_xargs")
    assert asked(vllm) == {**(own or {}), "flat_logprobs": 1}
    assert asked(vllm, logprobs=True) == asked(vllm, recorded=False) == asked(Quirks()) == own


@pytest.mark.parametrize(
    "fields, block",
    [
        ({"stream": True}, 8),
        ({"stream": True, "tools": []}, 8),
        ({"stream": True, "tools": [{"type": "function", "function": {"name": "look"}}]}, None),
        ({"stream": True, "tools": [{"type": "function", "function": {"name": "look"}}], "tool_choice": "none"}, None),
        ({}, None),
    ],
)
def test_vllm_is_asked_for_blocks_of_tokens_in_streams_without_tools(
    fields: dict[str, Json], block: int | None
) -> None:
    body = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})
    vllm = ChatRequest.parse(body, {}, quirks=Quirks(stream_blocks=True))
    assert vllm.payload("base", 8).get("stream_interval") == block
    assert "stream_interval" not in vllm.payload("base")
    assert "stream_interval" not in ChatRequest.parse(body, {}).payload("base", 8)
