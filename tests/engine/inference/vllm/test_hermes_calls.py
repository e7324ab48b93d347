"""vLLM reads calls as the embedded engine does. The cases are one process of their own: vLLM changes its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from offbook.tiny import path as tiny_policy

READ = """
import json, sys

from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

import offbook.engine.inference.vllm.hermes_calls
from offbook.engine.inference.chat.families import HERMES_CALLS

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("find", "book")]
fields = {"messages": [{"role": "user", "content": "?"}], "tools": tools, "tool_choice": sys.argv[3]}
request = ChatCompletionRequest.model_validate(fields)
kind = ParserManager.get_parser(tool_parser_name=HERMES_CALLS, enable_auto_tools=True)


def calls_of(calls):
    return [[call.name, call.arguments] for call in calls or ()]


def whole(text):
    _, content, calls = kind(tokenizer, request.tools).parse(text, request, enable_auto_tools=True)
    return [content or "", calls_of(calls)]


def streamed(text):
    parser, content, calls = kind(tokenizer, request.tools), "", {}
    for at in range(0, len(text), 3):
        piece = text[at : at + 3]
        delta = parser.parse_delta(piece, tokenizer.encode(piece), request, [], finished=at + 3 >= len(text))
        if delta is not None:
            content += delta.content or ""
            for call in delta.tool_calls or ():
                calls[call.index] = call.function
    return [content, calls_of(calls.values())]


print(json.dumps([[whole(text), streamed(text)] for text in json.loads(sys.argv[2])]))
"""
FIND = ["find", '{"id": 7}']
BARE = '{"name": "find", "arguments": {"id": 7}}'
TAGGED = f"<tool_call>\n{BARE}\n</tool_call>"
CASES: list[tuple[str, str, list[list[str]]]] = [
    (TAGGED, "", [FIND]),
    (f"Let me look. {TAGGED}\n{TAGGED}", "Let me look. ", [FIND, FIND]),
    (BARE, "", [FIND]),
    (f"```json\n{BARE}\n```", "", [FIND]),
    ("```json", "```json", []),
    ("Seven.", "Seven.", []),
    ('{"name": "other", "arguments": {}}', '{"name": "other", "arguments": {}}', []),
    ('<tool_call>\n{"name": 7}\n</tool_call>', '<tool_call>\n{"name": 7}\n</tool_call>', []),
]


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_vllm_reads_calls_as_the_embedded_engine_does(choice: str, require: Callable[[bool, str], None]) -> None:
    require(find_spec("vllm") is not None, "scripts/bootstrap test")
    texts = json.dumps([text for text, _, _ in CASES])
    command = [sys.executable, "-c", READ, str(tiny_policy()), texts, choice]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    for (text, content, calls), ways in zip(CASES, json.loads(answer.stdout.splitlines()[-1]), strict=True):
        assert ways == [[content, calls] if choice == "auto" else [text, []]] * 2, text


pytestmark = pytest.mark.slow("seconds each: processes, trainings, deadlines")
