"""The line that the policy goes by before a call is a thought, which is told from its message's text."""

import random

import pytest
from transformers import AutoTokenizer

from offbook.tiny import path
from policies.services import service_episode
from policies.tokenizer import render
from policies.train import encode

TOKENIZER = AutoTokenizer.from_pretrained(path("tiny-mcp"))
USER = {"role": "user", "content": "status of order 4821"}
CALL = {"type": "function", "function": {"name": "order_status", "arguments": '{"order": "4821"}'}}
WRITTEN = '<tool_call>\n{"name": "order_status", "arguments": {"order": "4821"}}\n</tool_call><|im_end|>\n'


def tool(name: str, **properties: object) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("ping"), tool("order_status", order={"type": "string"})]


def said(**fields: object) -> str:
    """The last message of a conversation in which the assistant has called a tool."""
    message = {"role": "assistant", "content": None, "tool_calls": [CALL], **fields}
    return render(TOKENIZER, [USER, message], TOOLS).split("<|im_start|>assistant\n")[1]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_a_thought_that_comes_back_is_rendered_as_it_was_sampled(field: str) -> None:
    assert said(**{field: "status<2>(order)"}) == f"<think>status<2>(order)</think>{WRITTEN}"


def test_without_its_thought_a_call_goes_by_the_whole_line_of_its_tool() -> None:
    assert said() == f"<think>order_status<2>(order)</think>{WRITTEN}"


@pytest.mark.parametrize(("thought", "content"), [("<1>", None), ("<1>", "Looking.\n"), ("", "Looking.\n"), ("", None)])
def test_a_prompt_and_what_was_sampled_open_the_next_prompt(thought: str, content: str | None) -> None:
    tags = f"<think>{thought}</think>" if thought else ""
    sampled = f"{render(TOKENIZER, [USER], TOOLS, prompt=True)}{tags}{content or ''}{WRITTEN}"
    message = {"role": "assistant", "content": content, "reasoning": thought, "tool_calls": [CALL]}
    following = render(TOKENIZER, [USER, message, {"role": "tool", "content": "shipped"}], TOOLS, prompt=True)
    assert following.startswith(sampled)
    ids = TOKENIZER(sampled).input_ids
    assert TOKENIZER(following).input_ids[: len(ids)] == ids


def test_a_call_of_a_tool_that_is_not_offered_goes_by_its_name() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert "<think>order_status</think>" in render(TOKENIZER, [USER, message], TOOLS[:1])


def test_a_text_has_no_thought() -> None:
    assert "<think>" not in render(TOKENIZER, [USER, {"role": "assistant", "content": "Hello."}], TOOLS)


def test_forgotten_turns_are_context_and_have_the_whole_lines() -> None:
    drawn = service_episode(random.Random(3))
    turns = len(drawn.turns)
    whole = encode(TOKENIZER, drawn)
    for forgotten in range(1, turns):
        example = encode(TOKENIZER, drawn, forgotten)
        text = TOKENIZER.decode([each for each, own in zip(example.ids, example.written, strict=True) if own])
        assert text.count("<|im_end|>") == turns - forgotten
        assert sum(example.written) < sum(whole.written)
    lines = {line for line in render(TOKENIZER, [USER], drawn.tools).splitlines()}
    text = TOKENIZER.decode(encode(TOKENIZER, drawn, turns - 1).ids)
    thoughts = [part.split("</think>")[0] for part in text.split("<think>")[1:]]
    assert thoughts and all(any(thought in line for line in lines) for thought in thoughts)
