"""The three hand-written readers (requests, streams, tool calls) on bytes that nobody meant: read or refused, by name.

`corpus/` holds inputs that once were, or could be, trouble; hypothesis changes them further, the same way at each run.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbook.base.errors import EngineError
from offbook.base.types import CallStatus
from offbook.base.wire import TRAJECTORY_HEADER
from offbook.engine.inference.chat.tool_calls import (
    PYTHON_TAG,
    TOOL_CALLS,
    CallParser,
    EndingCalls,
    HermesParser,
    ToolCall,
    read_llama,
    read_mistral,
)
from offbook.server.calls.chat_exchange import _engine_error  # pyright: ignore[reportPrivateUsage]
from offbook.server.calls.chat_request import ChatRequest
from offbook.server.calls.sampled_answer import EventStream, Sampled, json_object, understood
from offbook.server.errors import ApiError
from offbook.server.sampler.transport import AnswerLimits

CORPUS = Path(__file__).with_name("corpus")
FUZZED = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],  # of a busy machine
)
READERS: dict[str, Any] = {
    "hermes": lambda: HermesParser(),
    "llama": lambda: EndingCalls(PYTHON_TAG, "{", read_llama),
    "mistral": lambda: EndingCalls(TOOL_CALLS, None, read_mistral),
}


def corpus(name: str) -> list[str]:
    return json.loads((CORPUS / f"{name}.json").read_text("utf-8"))


@st.composite
def damaged(draw: st.DrawFn, name: str) -> str:
    """An input of the corpus with a part cut out, doubled, or replaced."""
    text = draw(st.sampled_from(corpus(name)))
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 20)))
    kind = draw(st.sampled_from(["cut", "double", "replace", "as it is"]))
    put = {"cut": "", "double": text[start:end] * 2, "as it is": text[start:end]}.get(kind)
    return text[:start] + (put if put is not None else draw(st.text(max_size=8))) + text[end:]


# ---- requests


def read_request(raw: bytes) -> None:
    try:
        request = ChatRequest.parse(raw, {TRAJECTORY_HEADER: "t"})
    except ApiError as error:
        assert 400 <= error.status < 500 and len(str(error)) < 5_000
        return
    sent = request.payload("base")
    assert sent["model"] == "base" and request.limits.choices >= 1 and request.limits.bytes > 0


@pytest.mark.parametrize("text", corpus("requests"))
def test_requests_of_the_corpus_are_read_or_refused(text: str) -> None:
    read_request(text.encode())


@FUZZED
@given(damaged("requests"))
def test_any_request_is_read_or_refused(text: str) -> None:
    read_request(text.encode("utf-8", "surrogatepass"))


# ---- streams


class Body:
    """A response whose body comes in these pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.content = self
        self._pieces = list(pieces)

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


async def read_stream(pieces: list[bytes]) -> tuple[str, Sampled]:
    """How it ended, and what was sampled."""
    sampled = Sampled(AnswerLimits(choices=2, tokens=50, bytes=100_000))
    try:
        stream = EventStream(cast(Any, Body(pieces)), sampled.limits.bytes)
        while (events := await stream.next()) is not None:
            for chunk in map(json_object, events):
                if "error" in chunk:
                    raise _engine_error(chunk)
                understood(sampled.add_chunk, chunk)
        sampled.check()
        ending = "whole"
    except (EngineError, ApiError) as error:
        ending = type(error).__name__
    for output in sampled.outputs(CallStatus.FAILED, frozenset()):
        assert len(output.token_ids) == len(output.logprobs) and output.index in (0, 1)
    return ending, sampled


@pytest.mark.parametrize("text", corpus("streams"))
async def test_streams_of_the_corpus_are_read_or_refused(text: str) -> None:
    await read_stream([text.encode()])


@FUZZED
@given(damaged("streams"), st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_any_stream_is_read_or_refused_however_it_is_cut(text: str, sizes: list[int]) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    pieces: list[bytes] = []
    at = 0
    while at < len(raw):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(raw[at : at + size])
        at += size
    whole, cut = asyncio.run(read_stream([raw])), asyncio.run(read_stream(pieces))
    assert whole[0] == cut[0] and whole[1].choices == cut[1].choices


# ---- tool calls


def read_calls(parser: CallParser, pieces: list[str], *, truncated: bool) -> list[ToolCall]:
    found = [item for piece in pieces for item in parser.push(piece)] + parser.finish(truncated=truncated)
    assert all(isinstance(item, str | ToolCall) for item in found)
    return [item for item in found if isinstance(item, ToolCall)]


@pytest.mark.parametrize("family", READERS)
@pytest.mark.parametrize("text", corpus("tool_calls"))
def test_tool_calls_of_the_corpus_are_calls_or_text(text: str, family: str) -> None:
    read_calls(READERS[family](), [text], truncated=False)


@pytest.mark.parametrize("family", READERS)
@FUZZED
@given(text=damaged("tool_calls"), size=st.integers(1, 30), truncated=st.booleans())
def test_any_text_is_calls_or_text_however_it_is_cut(family: str, text: str, size: int, truncated: bool) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    whole = read_calls(READERS[family](), [text], truncated=truncated)
    assert read_calls(READERS[family](), pieces, truncated=truncated) == whole
    for call in whole:
        assert call.name and isinstance(json.loads(call.arguments), dict)
