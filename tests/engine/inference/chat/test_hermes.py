"""Tool calls read from text, whole and in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbook.engine.inference.chat.tool_calls import HermesParser, ToolCall

A = '<tool_call>\n{"name": "find", "arguments": {"id": "7"}}\n</tool_call>'
B = '<tool_call>\n{"name": "close", "arguments": {}}\n</tool_call>'
TAGGED = '<tool_call>\n{"name": "say", "arguments": {"text": "a</tool_call>b<tool_call>{"}}\n</tool_call>'
ESCAPED = '<tool_call>{"name": "say", "arguments": {"text": "\\\\\\"</tool_call>}"}}</tool_call>'
TAG = ToolCall("say", '{"text": "a</tool_call>b<tool_call>{"}')
ESCAPE = ToolCall("say", '{"text": "\\\\\\"</tool_call>}"}')
FIND, CLOSE = ToolCall("find", '{"id": "7"}'), ToolCall("close", "{}")


def parse(text: str, *, pieces: int = 1, truncated: bool = False) -> tuple[str, list[ToolCall], int]:
    """Content, calls and failures of a text that comes in pieces of equal size."""
    parser = HermesParser()
    size = max(1, -(-len(text) // pieces))
    out = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
    out += parser.finish(truncated=truncated)
    calls = [piece for piece in out if isinstance(piece, ToolCall)]
    return "".join(piece for piece in out if isinstance(piece, str)), calls, parser.failures


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "calls", "failures"),
    [
        ("hello", "hello", [], 0),
        (A, "", [FIND], 0),
        (f"I look.\n{A}", "I look.\n", [FIND], 0),
        (f"{A}\n{B}", "", [FIND, CLOSE], 0),
        (f"{A}\n done", "\n done", [FIND], 0),
        ("<tool_call>\nnonsense\n</tool_call>", "<tool_call>\nnonsense\n</tool_call>", [], 1),
        (f"<tool_call>[1]</tool_call>{A}", "<tool_call>[1]</tool_call>", [FIND], 1),
        ('<tool_call>{"name": "x"}</tool_call>', '<tool_call>{"name": "x"}</tool_call>', [], 1),
        (
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            [],
            1,
        ),
        (A.removesuffix("</tool_call>"), "", [FIND], 0),
        ('<tool_call>{"name": "find", "argum', '<tool_call>{"name": "find", "argum', [], 1),
        ("a < b <tool", "a < b <tool", [], 0),
        (TAGGED, "", [TAG], 0),
        (f"{TAGGED}\n{B}", "", [TAG, CLOSE], 0),
        (TAGGED.removesuffix("</tool_call>"), "", [TAG], 0),
        (f"{ESCAPED} x", " x", [ESCAPE], 0),
        (f'<tool_call>{{"name": "f", "a</tool_call> x {A}', '<tool_call>{"name": "f", "a</tool_call> x ', [FIND], 1),
        (
            f'<tool_call>{{"name": "f, "a": {{}}}}\n</tool_call>{A}',
            '<tool_call>{"name": "f, "a": {}}\n</tool_call>',
            [FIND],
            1,
        ),
        (f'<tool_call>{{"name": "f"</tool_call>}}{A}', '<tool_call>{"name": "f"</tool_call>}', [FIND], 1),
        (f"{A.removesuffix('</tool_call>')}}}</tool_call>", f"{A.removesuffix('</tool_call>')}}}</tool_call>", [], 1),
    ],
)
def test_text_splits_into_content_and_calls(
    text: str, content: str, calls: list[ToolCall], failures: int, pieces: int
) -> None:
    assert parse(text, pieces=pieces) == (content, calls, failures)


def test_a_block_cut_by_the_length_limit_is_no_call() -> None:
    cut = TAGGED[: TAGGED.index("b<tool_call>") + 1]
    assert parse(cut, truncated=True) == (cut, [], 1)
    text = A.removesuffix("</tool_call>")
    assert parse(text, truncated=True) == (text, [], 1)
    assert parse(A, truncated=True) == ("", [FIND], 0)


def test_json_too_deep_to_be_read_is_no_call() -> None:
    deep = "<tool_call>" + '{"a":' * 100_000 + "1" + "}" * 100_000 + "</tool_call>"
    assert parse(f"{deep}{A}") == (deep, [FIND], 1)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"name": "f", "arguments": {"b":1,   "a": "\\u00e9"}}', '{"b":1,   "a": "\\u00e9"}'),
        ('{"arguments": {"x": {"arguments": 1}}, "name": "f"}', '{"x": {"arguments": 1}}'),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
    ],
)
def test_arguments_stay_as_the_model_wrote_them(written: str, arguments: str) -> None:
    assert parse(f"<tool_call>{written}</tool_call>")[1] == [ToolCall("f", arguments)]


def test_calls_beyond_the_first_stay_text_when_only_one_is_wanted() -> None:
    parser = HermesParser(most=1)
    assert parser.push(f"{A}\n{B}") + parser.finish(truncated=False) == [FIND, B]


@given(
    st.lists(
        st.sampled_from(
            [A, B, TAGGED, ESCAPED, '"', "}", "\\\\", "<tool_call>", "</tool_call>", "{", "text", " ", "\n", "<", "é"]
        ),
        max_size=8,
    ),
    st.data(),
)
def test_pieces_never_change_the_result(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    assert parse(text, pieces=data.draw(st.integers(1, 200))) == parse(text)
