"""Chunks that are relayed by their form: the same records, the same events and the same errors as those read in full."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbook.base.errors import EngineError
from offbook.base.types import CallStatus
from offbook.base.wire import RECORD_HEADER
from offbook.server.calls.chat_answer import shown
from offbook.server.calls.chat_request import ChatRequest
from offbook.server.calls.chunk_relay import ChunkRelay
from offbook.server.calls.sampled_answer import Sampled, json_object, understood

HEAD = b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"base","choices":[{"index":%d,"delta":'
FUZZED = settings(
    max_examples=300, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)


def chunk(delta: Any, ids: Any = (5,), logprobs: Any = (-0.25,), index: int = 0, reason: str | None = None) -> bytes:
    """A chunk in the bytes of vLLM 0.32 with Offbook's plugin."""
    tail = {
        "logprobs": {"content": [], "token_logprobs": list(logprobs)},
        "finish_reason": reason,
        "token_ids": list(ids),
    }
    return HEAD % index + orjson.dumps(delta) + b"," + orjson.dumps(tail)[1:-1] + b"}]}"


def plain(delta: Any) -> bytes:
    """A chunk of a call that is not recorded."""
    return HEAD % 0 + orjson.dumps(delta) + b',"logprobs":null,"finish_reason":null,"token_ids":null}]}'


def request(**fields: Any) -> ChatRequest:
    body = {"model": "mine@3", "messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 40, "n": 2}
    return ChatRequest.parse(orjson.dumps(body | fields), {RECORD_HEADER: "1"})


def read(raws: list[bytes], asked: ChatRequest, *, relayed: bool) -> tuple[list[Any], Any, str, int]:
    """The client's events, the record, how it ended, and how many chunks were relayed by their form."""
    sampled = Sampled(asked.limits)
    relay = ChunkRelay(asked, sampled)
    events: list[Any] = []
    count, ending = 0, "whole"
    try:
        for raw in raws:
            if relayed and (event := relay.event(raw)) is not None:
                assert event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2
                assert b"\r" not in event
                events.append(orjson.loads(event[6:]))
                count += 1
                continue
            answer = json_object(raw)
            understood(sampled.add_chunk, answer)
            events.append(orjson.loads(orjson.dumps(shown(answer, asked, None))))
            relay.learn(raw, answer)
    except EngineError as error:
        ending = str(error)
    outputs = [repr(output) for output in sampled.outputs(CallStatus.FAILED)]  # repr: NaN is equal to itself there
    return events, outputs, ending, count


def same(raws: list[bytes], asked: ChatRequest) -> int:
    """Check both ways against each other; the number of chunks relayed by their form."""
    whole, fast = read(raws, asked, relayed=False), read(raws, asked, relayed=True)
    assert fast[:3] == whole[:3]
    return fast[3]


def test_chunks_after_the_first_of_a_choice_are_relayed_by_their_form() -> None:
    texts = [{"content": text} for text in ("a", 'q"\\', "\n", "é\U0001f600", "", ',"logprobs":null}]}')]
    calls = [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in ('{"a"', ": 1}")]
    deltas = [*texts, {"reasoning": "hm"}, {}, *calls]
    raws = [chunk(delta, [i], [-i / 7]) for i, delta in enumerate(deltas)]
    assert same([*raws, chunk({}, reason="stop")], request()) == len(deltas) - 1
    two = [chunk(delta, index=index) for delta in deltas for index in (0, 1)]
    assert same(two, request()) == 2 * (len(deltas) - 1)
    blocks = [chunk({"content": "abc"}, [1, 2, 3], [-1e-7, 0, -20.5]) for _ in range(4)]
    assert same(blocks, request()) == 3
    assert same([plain({"content": "x"}) for _ in range(4)], request()) == 3


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"return_token_ids": True}])
def test_what_the_client_asked_for_of_each_token_is_read_in_full(fields: dict[str, Any]) -> None:
    assert same([chunk({"content": "a"})] * 3, request(**fields)) == 0


@pytest.mark.parametrize(
    "odd",
    [
        chunk({"content": "a"}, [2**31], [-0.5]),
        chunk({"content": "a"}).replace(b"[5]", b"[1%s]" % (b"0" * 25)),
        chunk({"content": "a"}, [1, 2], [-0.5]),
        chunk({"content": "a"}, [], []),
        chunk({"content": "a"}, [1], [0.5]),
        chunk({"content": "a"}, [1], [-9999.0]),
        chunk({"content": "a"}, [1], [None]),
        chunk({"content": "a"}, [1] * 41, [-0.5] * 41),
        chunk({"content": "a"}, [True], [-0.5]),
        chunk([1]),
        chunk(None),
        chunk("a"),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": 5}}]}),
        chunk({"tool_calls": [{"index": 5000}]}),
        chunk({"tool_calls": 7}),
        chunk({"content": "a", "x": [[[[]]]]}),
        chunk(json.loads("[" * 100 + "]" * 100)),
        chunk({"content": "a"}).replace(b'"a"', b'"\xff"'),
        chunk({"content": "a"}).replace(b'"a"', b'"a"\r'),
        chunk({"content": "a"}).replace(b"-0.25", b"01.5"),
        chunk({"content": "a"}).replace(b"[5]", b"[5,]"),
        chunk({"content": "a"}).replace(b'"a"', b'"a"},"logprobs":{"content":"b"'),
        chunk({"content": "a"})[:-1],
        chunk({"content": "a"}) + b" ",
        chunk({"content": "a"}, reason="length"),
        chunk({"content": "a"}, index=3),
    ],
)
def test_a_chunk_that_is_odd_ends_as_it_does_when_read_in_full(odd: bytes) -> None:
    raws = [chunk({"content": "x"}), chunk({"content": "y"}), odd, chunk({"content": "z"})]
    assert same(raws, request()) >= 1


def test_a_form_is_learned_from_the_choice_s_own_delta_only() -> None:
    nested = b'{"id":{"delta":1},"model":"base","choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}]}'
    twice = b'{"delta":{},"logprobs":null,"finish_reason":null}]}'
    assert same([nested, nested, nested.replace(b'"delta":1', twice[1:-1])], request()) == 0


pieces = st.sampled_from(
    [b"", b'"', b"}", b"{", b",", b"\\", b"\r", b"null", b"1e999", b"-", b'"delta":', b',"logprobs":']
)


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Chunks with any text, ids and logprobs; some with a part cut out or replaced."""
    raws: list[bytes] = []
    for _ in range(draw(st.integers(3, 7))):
        count = draw(st.integers(1, 3))
        ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
        values = draw(st.lists(st.floats(-9998, 0), min_size=count, max_size=count))
        name = draw(st.sampled_from(["content", "content", "reasoning", "role"]))
        text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
        raw = chunk(
            {name: text}, ids, values, draw(st.integers(0, 1)), draw(st.sampled_from([None, None, None, "stop"]))
        )
        if draw(st.integers(0, 3)) == 0:
            start = draw(st.integers(0, len(raw)))
            raw = raw[:start] + draw(pieces) + raw[start + draw(st.integers(0, 4)) :]
        raws.append(raw.replace(b"\n", b""))
    return raws


@FUZZED
@given(streams())
def test_any_stream_is_recorded_and_shown_as_when_read_in_full(raws: list[bytes]) -> None:
    same([chunk({"content": "a"}, index=0), chunk({"content": "b"}, index=1), *raws], request())
