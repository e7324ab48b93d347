"""Messages and tools from a Hugging Face dataset are the same prompt as the same messages and tools from JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, cast

import pytest

from offbook.client.rollouts.dataset import unpadded
from tests.families.builders import ATTENTION, QWEN3_5, Family, make_tokenizer
from tests.families.tool_calls import ASKED, SAID, TOOL

CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": CITY}}
CALLED = {"id": "abcdefghj", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
MESSAGES = [
    *ASKED,
    SAID,
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "7"},
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "abcdefghj", "content": "8"},
]


@pytest.mark.parametrize("family", [*ATTENTION, QWEN3_5], ids=lambda family: family.name)
def test_a_prompt_of_a_dataset_row_has_no_arguments_of_other_tools(
    family: Family, require: Callable[[bool, str], None]
) -> None:
    require(find_spec("datasets") is not None, "pip install datasets")
    import datasets

    row: dict[str, Any] = {"id": "a", "tools": [TOOL, WEATHER], "messages": MESSAGES if family.shows_tools else ASKED}
    [scenario] = cast(Iterable[dict[str, Any]], unpadded(datasets.Dataset.from_list([row])))
    tokenizer = make_tokenizer(family)

    def prompt(messages: Any, tools: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))

    loaded = prompt(scenario["messages"], scenario["tools"])
    assert loaded == prompt(row["messages"], row["tools"])
    assert "null" not in loaded and "None" not in loaded
    if family.shows_tools:
        assert '{"city": "Oslo"}' in loaded or "<parameter=city>\nOslo\n</parameter>" in loaded
