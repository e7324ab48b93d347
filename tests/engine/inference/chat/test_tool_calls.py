"""Tool calls of Llama 3 and Mistral read from text, whole and in pieces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offbook import tiny
from offbook.engine.inference.chat.tool_calls import ToolCall, format_of

LLAMA, MISTRAL = "<|start_header_id|>{{ tools }}" + '"parameters"', "{{ tools }}[TOOL_CALLS]"
FIND, CLOSE = ToolCall("find", '{"id":  "7;}"}'), ToolCall("close", "{}")
L_FIND, L_CLOSE = '{"name": "find", "parameters": {"id":  "7;}"}}', '{"name": "close", "parameters": {}}'
M_FIND, M_CLOSE = (
    '{"name": "find", "arguments": {"id":  "7;}"}, "id": "abcdefghi"}',
    '{"name": "close", "arguments": {}}',
)


def model(folder: Path, template: str) -> Path:
    (folder / "config.json").write_text('{"model_type": "any"}')
    (folder / "chat_template.jinja").write_text(template)
    return folder


def parse(
    folder: Path, text: str, pieces: int = 1, most: int | None = None, truncated: bool = False
) -> tuple[str, list[ToolCall], int]:
    """Content, calls and failures of a text that comes in pieces of equal size."""
    parser = format_of(folder).parser(most)
    size = max(1, -(-len(text) // pieces))
    out = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
    out += parser.finish(truncated=truncated)
    calls = [piece for piece in out if isinstance(piece, ToolCall)]
    assert parser.calls == len(calls)
    return "".join(piece for piece in out if isinstance(piece, str)), calls, parser.failures


NOT_JSON = '{"name": "find", "arguments": {"id": NaN}}'
"""Python's own decoder takes it."""


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize(
    ("template", "text", "content", "calls", "failures"),
    [
        (LLAMA, "hello", "hello", [], 0),
        (LLAMA, " \n", " \n", [], 0),
        (LLAMA, L_FIND, "", [FIND], 0),
        (LLAMA, f" \n{L_FIND}\n", "", [FIND], 0),
        (LLAMA, f"<|python_tag|>{L_FIND}; {L_CLOSE}", "", [FIND, CLOSE], 0),
        (LLAMA, f"I look: <|python_tag|>{L_CLOSE}", "I look: ", [CLOSE], 0),
        (LLAMA, f"I look: {L_FIND}", f"I look: {L_FIND}", [], 0),
        (LLAMA, M_CLOSE, "", [CLOSE], 0),
        (LLAMA, '{"answer": 7}', '{"answer": 7}', [], 0),
        (LLAMA, '{"name": "find"}', '{"name": "find"}', [], 1),
        (LLAMA, f"{L_FIND} and more", f"{L_FIND} and more", [], 1),
        (LLAMA, "<|python_tag|>find.call()", "<|python_tag|>find.call()", [], 1),
        (LLAMA, "a <|python", "a <|python", [], 0),
        (MISTRAL, "hello [TOOL", "hello [TOOL", [], 0),
        (MISTRAL, L_FIND, L_FIND, [], 0),
        (MISTRAL, f"[TOOL_CALLS] [{M_FIND}, {M_CLOSE}]", "", [FIND, CLOSE], 0),
        (MISTRAL, f"I look.[TOOL_CALLS] [{M_FIND}]", "I look.", [FIND], 0),
        (MISTRAL, '[TOOL_CALLS]find[ARGS]{"id":  "7;}"}[TOOL_CALLS]close{}', "", [FIND, CLOSE], 0),
        (MISTRAL, "[TOOL_CALLS]close[CALL_ID]abcdefghi[ARGS]{}", "", [CLOSE], 0),
        (LLAMA, NOT_JSON, NOT_JSON, [], 1),
        (MISTRAL, f"[TOOL_CALLS] [{NOT_JSON}]", f"[TOOL_CALLS] [{NOT_JSON}]", [], 1),
        (MISTRAL, '[TOOL_CALLS]find{"id": -Infinity}', '[TOOL_CALLS]find{"id": -Infinity}', [], 1),
        ("plain", f"<tool_call>{NOT_JSON}</tool_call>", f"<tool_call>{NOT_JSON}</tool_call>", [], 1),
        (MISTRAL, "[TOOL_CALLS] [7]", "[TOOL_CALLS] [7]", [], 1),
        (MISTRAL, "[TOOL_CALLS] [", "[TOOL_CALLS] [", [], 1),
        (MISTRAL, "[TOOL_CALLS] []", "[TOOL_CALLS] []", [], 1),
        (MISTRAL, "[TOOL_CALLS]close{} and more", "[TOOL_CALLS]close{} and more", [], 1),
    ],
)
def test_calls_are_read_and_everything_else_stays_text(
    tmp_path: Path, template: str, text: str, content: str, calls: list[ToolCall], failures: int, pieces: int
) -> None:
    assert parse(model(tmp_path, template), text, pieces) == (content, calls, failures)


@pytest.mark.parametrize(("template", "text"), [(LLAMA, L_CLOSE), (MISTRAL, "[TOOL_CALLS]close{}")])
def test_a_call_that_a_length_limit_may_have_cut_stays_text(tmp_path: Path, template: str, text: str) -> None:
    assert parse(model(tmp_path, template), text, truncated=True) == (text, [], 1)


def test_calls_beyond_the_most_stay_text(tmp_path: Path) -> None:
    assert parse(model(tmp_path, LLAMA), f"{L_FIND};{L_CLOSE}", most=1) == (L_CLOSE, [FIND], 0)
    text, calls, failures = parse(model(tmp_path, MISTRAL), f"[TOOL_CALLS] [{M_FIND}, {M_CLOSE}]", most=1)
    assert (calls, failures) == ([FIND], 0)
    assert json.loads(text.removeprefix("[TOOL_CALLS] ")) == [json.loads(M_CLOSE)]


def test_a_format_that_is_not_read_here_is_told_once_and_its_calls_stay_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "<function=close></function>"
    assert parse(model(tmp_path, "{{ tools }}<function=f><parameter=p>"), text) == (text, [], 0)
    assert "format qwen3_coder are not parsed by this engine and stay text: use --engine vllm" in caplog.text


def test_the_tiny_policy_and_models_without_tools_are_read_as_hermes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert format_of(tiny.path()).name == format_of(model(tmp_path, "plain")).name == "hermes"
    assert caplog.text == ""
