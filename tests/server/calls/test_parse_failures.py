"""Answers that looked like a tool call and were none: as the engine says, else by the marks of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from offbook.base.wire import TRAJECTORY_HEADER
from offbook.server.calls.chat_request import ChatRequest
from offbook.server.calls.recorder import OpenCall, Recorder
from offbook.server.calls.sampled_answer import Sampled
from offbook.server.records.store import Store
from offbook.server.sampler.transport import AnswerLimits

TOOL = {"type": "function", "function": {"name": "find", "parameters": {}}}
MARK = 99
"""The base's special token that begins a call."""


def choice(index: int = 0, text: str | None = "hi", **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text} | fields.pop("message", {})
    return {"index": index, "message": message, "token_ids": [7, 8], "finish_reason": "stop"} | fields


async def recorded(folder: Path, *choices: dict[str, Any], tools: tuple[Any, ...] = (TOOL,)) -> list[bool]:
    """Which choices of a recorded and read call are parse failures."""
    store = await Store.open(folder / "records.db")
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    request = ChatRequest.parse(orjson.dumps(body | ({"tools": tools} if tools else {})), {TRAJECTORY_HEADER: "t"})
    sampled = Sampled(AnswerLimits(choices=len(choices)))
    sampled.add_answer({"prompt_token_ids": [1, 2], "choices": list(choices)})
    try:
        kept = await Recorder(store, frozenset({MARK})).keep(OpenCall(request, "t", "m", 0), sampled)
        read = (await store.calls_of(["t"]))["t"][-1]
    finally:
        await store.close()
    assert read == kept
    return [output.parse_failure for output in read.outputs]


async def test_a_parse_failure_is_an_answer_with_the_tool_token_or_its_text_and_no_parsed_call(tmp_path: Path) -> None:
    parsed = choice(
        0,
        None,
        message={"tool_calls": [{"id": "1", "function": {"name": "find", "arguments": "{}"}}]},
        token_ids=[MARK, 1],
    )
    by_token = choice(1, "find", token_ids=[MARK, 1])
    by_text = choice(2, "<tool_call>{")
    plain = choice(3, "hello")
    assert await recorded(tmp_path, parsed, by_token, by_text, plain) == [False, True, True, False]
    assert await recorded(tmp_path, choice(0, "find", token_ids=[MARK, 1]), by_text | {"index": 1}, tools=()) == [
        False,
        False,
    ]


@pytest.mark.parametrize(
    "text", ['[TOOL_CALLS]find{"a"', '<|python_tag|>{"na', ' {"name": "find", "par', '<function=find>{"a": 1}']
)
async def test_a_parse_failure_is_known_in_the_format_of_each_family(tmp_path: Path, text: str) -> None:
    assert await recorded(tmp_path, choice(0, text)) == [True]
    assert await recorded(tmp_path, choice(0, 'it is {"name": "Ann"}')) == [False]


async def test_the_engines_own_word_is_taken_whole_or_from_the_last_chunk(tmp_path: Path) -> None:
    quoted = choice(0, "it wrote <tool_call> and meant the text", parse_failure=False)
    unseen = choice(1, "an unknown format", parse_failure=True)
    assert await recorded(tmp_path, quoted, unseen) == [False, True]
    sampled = Sampled()
    sampled.add_chunk({"choices": [{"index": 0, "delta": {"content": "<tool_call>"}, "finish_reason": None}]})
    assert sampled.choices[0].parse_failure is None
    sampled.add_chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "parse_failure": True}]})
    assert sampled.choices[0].parse_failure is True
