"""Calls that a policy writes without its template's tags."""

from __future__ import annotations

import pytest

from offbook.base.types import Tool
from offbook.engine.inference.chat.tool_calls import HermesParser, ToolCall
from offbook.engine.inference.chat.untagged_calls import UntaggedCalls

TOOLS: list[Tool] = [{"type": "function", "function": {"name": name}} for name in ("find", "book_room")]
FIND = ToolCall("find", '{"id": 7}')
BOOK = ToolCall("book_room", '{"nights": 2}')


def read(text: str, *, size: int, truncated: bool = False, most: int | None = None) -> tuple[list[str | ToolCall], int]:
    parser = UntaggedCalls(HermesParser(most), TOOLS, most)
    pieces = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
    pieces += parser.finish(truncated=truncated)
    joined: list[str | ToolCall] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    assert parser.calls == sum(isinstance(piece, ToolCall) for piece in pieces)
    return joined, parser.untagged


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "find", "arguments": {"id": 7}}', [FIND]),
        (' \n{ "name" : "find", "parameters": {"id": 7} }\n', [FIND]),
        ('```json\n{"name": "find", "arguments": {"id": 7}}\n```', [FIND]),
        ('```\n{"name": "find", "arguments": {"id": 7}}\n```\n', [FIND]),
        ('{"name": "find", "arguments": {"id": 7}}\n{"name": "book_room", "arguments": {"nights": 2}}', [FIND, BOOK]),
        ('[{"name": "find", "arguments": {"id": 7}}, {"name": "book_room", "arguments": {"nights": 2}}]', [FIND, BOOK]),
    ],
)
def test_json_alone_that_names_an_offered_tool_is_a_call(text: str, calls: list[ToolCall], size: int) -> None:
    assert read(text, size=size) == (calls, len(calls))


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "delete", "arguments": {"id": 7}}',  # not offered
        '{"name": "find"}',
        '{"name": "find", "arguments": "7"}',
        '{"name": "find", "arguments": {"id": 7}',  # not closed
        '{"name": "find", "arguments": {"id": 7}} is what I would call',
        'I call {"name": "find", "arguments": {"id": 7}}',
        '{"answer": "find"}',
        "```python\nfind(7)\n```",
        "```json",
        "{",
        "   ",
        "Hello",
        '{"name": "find", "arguments": ' + '{"a": ' * 5000 + "}" * 5001,
    ],
)
def test_any_other_text_stays_as_it_is(text: str, size: int) -> None:
    assert read(text, size=size) == ([text], 0)


def test_tagged_calls_are_read_as_ever_and_are_not_untagged() -> None:
    tagged = 'Let me look. <tool_call>\n{"name": "find", "arguments": {"id": 7}}\n</tool_call>'
    assert read(tagged, size=1) == (["Let me look. ", FIND], 0)


def test_a_call_that_the_limit_cut_or_that_is_one_too_many_stays_text() -> None:
    whole = '{"name": "find", "arguments": {"id": 7}}'
    assert read(whole, size=5, truncated=True) == ([whole], 0)
    twice = f"{whole}\n{whole}"
    assert read(twice, size=5, most=1) == ([twice], 0)


def test_what_cannot_become_a_call_is_not_held_back() -> None:
    parser = UntaggedCalls(HermesParser(), TOOLS)
    assert parser.push("```py") == ["```py"]
    assert parser.push("thon") == ["thon"]
