import json
import random

import pytest
from transformers import AutoTokenizer

from offbook.tiny import path
from policies.episodes import episode

TOKENIZER = AutoTokenizer.from_pretrained(path())
USER = {"role": "user", "content": "where is order 4821?"}
CALL = '<tool_call>\n{"name": "order_status", "arguments": {"order": "4821"}}\n</tool_call>'


def tool(name, properties, required):
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": "not shown", "parameters": parameters}}


def call(arguments, name="order_status"):
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def render(messages, tools=None, prompt=False):
    return TOKENIZER.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)


def test_tools_are_shown_as_signatures_after_their_required_arguments_and_between_their_number_with_optional_and_numeric_arguments_marked():
    tools = [
        tool("order_status", {"order": {"type": "string"}}, ["order"]),
        tool("list", {"limit": {"type": "integer"}, "after": {"type": "string"}}, ["limit"]),
        {"type": "function", "function": {"name": "ping"}},
    ]
    assert render([USER], tools) == (
        "<|im_start|>system\n<tools>\norder<1>order_status<1>(order)\nlimit<2>list<2>(limit: number, after?)\n<3>ping<3>()\n</tools><|im_end|>\n"
        "<|im_start|>user\nwhere is order 4821?<|im_end|>\n"
    )


def test_what_the_policy_is_taught_to_write_before_a_call_is_a_part_of_a_tools_line():
    for seed in range(200):
        drawn = episode(random.Random(seed))
        lines = render(drawn.messages, drawn.tools).split("</tools>")[0].splitlines()
        for completion in (call for turn in drawn.turns for call in turn.calls):
            assert any(completion.removeprefix("<think>").split("</think>")[0] in line for line in lines)


def test_a_system_message_stands_before_the_tools_in_one_block():
    text = render([{"role": "system", "content": "Be brief."}, USER], [tool("ping", {}, [])], prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.\n<tools>\n<1>ping<1>()\n</tools><|im_end|>\n"
        "<|im_start|>user\nwhere is order 4821?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_tools_and_system_message_there_is_no_system_block():
    assert render([USER]) == "<|im_start|>user\nwhere is order 4821?<|im_end|>\n"


def test_arguments_may_be_a_json_string_or_a_mapping():
    for arguments in ['{"order": "4821"}', {"order": "4821"}]:
        for content in [None, ""]:
            said = {"role": "assistant", "content": content, "tool_calls": [call(arguments)]}
            assert render([USER, said]).endswith(f"<|im_start|>assistant\n{CALL}<|im_end|>\n")


def test_several_calls_and_their_results_keep_their_order():
    said = {
        "role": "assistant",
        "content": "Looking.",
        "tool_calls": [call('{"order": "4821"}'), call({"order": "4821"})],
    }
    results = [{"role": "tool", "tool_call_id": "c1", "content": text} for text in ('{"a": 1}', "b")]
    assert render([USER, said, *results], prompt=True).endswith(
        f"<|im_start|>assistant\nLooking.\n{CALL}\n{CALL}<|im_end|>\n"
        '<|im_start|>tool\n{"a": 1}<|im_end|>\n<|im_start|>tool\nb<|im_end|>\n<|im_start|>assistant\n'
    )


def test_content_may_come_in_parts():
    parts = [{"type": "text", "text": "where is "}, {"type": "text", "text": "order 4821?"}]
    assert render([{"role": "user", "content": parts}]) == render([USER])


@pytest.mark.parametrize("content", ["<1>", "<1>\n"])
def test_a_prompt_and_what_was_sampled_open_the_next_prompt(content: str):
    tools = [tool("order_status", {"order": {"type": "string"}}, ["order"])]
    sampled = render([USER], tools, prompt=True) + f"<1>\n{CALL}<|im_end|>"
    arguments = json.dumps(json.loads(CALL.split("\n")[1])["arguments"])
    said = {"role": "assistant", "content": content, "tool_calls": [call(arguments)]}
    following = render([USER, said, {"role": "tool", "content": "shipped"}], tools, prompt=True)
    assert following.startswith(sampled)
    ids = TOKENIZER(sampled).input_ids
    assert TOKENIZER(following).input_ids[: len(ids)] == ids
