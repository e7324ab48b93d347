import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from offbook.tiny import path
from policies.episodes import Episode
from policies.fields import KINDS, flat, words_of
from policies.service_requests import contains_value, naming
from policies.service_tools import ServiceTool, draw_service, signature, size_at
from policies.services import add_request_for_several, service_episode
from policies.words import WordSource

TOKENIZER = AutoTokenizer.from_pretrained(path("tiny-mcp"))
SERVERS = sorted((Path(__file__).parent / "real_tools").glob("*.json"))


def drawn_episodes(count=150, **options):
    return [service_episode(random.Random(seed), **options) for seed in range(count)]


def calls(drawn):
    return [call["function"] for message in drawn.messages for call in message.get("tool_calls", ())]


def fits(value, schema):
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "array":
            return isinstance(value, list) and all(fits(each, schema["items"]) for each in value)
        case "object":
            return set(value) == set(schema["properties"]) and all(
                fits(each, schema["properties"][name]) for name, each in value.items()
            )
        case "boolean":
            return isinstance(value, bool)
        case "number":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case _:
            return isinstance(value, str)


def test_a_seed_gives_the_same_services_again():
    assert drawn_episodes(30) == drawn_episodes(30)


def test_every_call_has_all_required_arguments_and_values_of_their_types():
    for drawn in drawn_episodes():
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in drawn.tools}
        for call in calls(drawn):
            schema, values = schemas[call["name"]], json.loads(call["arguments"])
            assert set(schema["required"]) <= set(values) <= set(schema["properties"])
            assert all(fits(value, schema["properties"][name]) for name, value in values.items())


def test_the_first_call_copies_its_values_from_the_request():
    for drawn in drawn_episodes():
        request, call = next(m for m in drawn.messages if m["role"] == "user"), calls(drawn)[0]
        assert contains_value(json.loads(call["arguments"]), request["content"])


def test_every_message_of_the_assistant_is_among_the_right_ones_of_its_turn():
    for drawn in drawn_episodes():
        spoken = [message for message in drawn.messages if message["role"] == "assistant"]
        for message, turn in zip(spoken, drawn.turns, strict=True):
            if "tool_calls" in message:
                function = message["tool_calls"][0]["function"]
                text = f'{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}'
                assert any(
                    call.startswith(f"<think>{message['reasoning_content']}</think><tool_call>") and text in call
                    for call in turn.calls
                )
            else:
                assert message["content"] in turn.texts


def results_and_answers(drawn):
    """Yield each request's results, rendered, with the answer."""
    results = []
    for message in drawn.messages:
        if message["role"] == "tool":
            results.append(message["content"])
        elif message["role"] == "assistant" and "tool_calls" not in message:
            yield results, message["content"].removeprefix("The answer is ").removesuffix(".")
            results = []


def test_answers_quote_the_last_result_or_all():
    several = 0
    for drawn in drawn_episodes():
        for results, quoted in results_and_answers(drawn):
            last, every = results[-1], "\n".join(results)
            whole = json.dumps(quoted)[1:-1] in last or all(part in last for part in quoted.split(", "))
            several += not whole
            assert whole or all(part in every for one in quoted.split(" and ") for part in one.split(", "))
    assert several > 20


def test_independent_calls_differ_and_copy_their_values_from_one_request():
    for seed in range(60):
        drawn = Episode("service", [])
        source = WordSource(random.Random(seed), held_out=False)
        tools = draw_service(source, size_at(source, level=1.0))
        add_request_for_several(drawn, source, tools, held_out=False)
        request, *rest = drawn.messages
        made = [(call["name"], call["arguments"]) for call in calls(drawn)]
        assert len(made) == len(set(made)) == len(drawn.turns) - 1 <= 3
        assert all(contains_value(json.loads(values), request["content"]) for _, values in made)
        assert [message["role"] for message in rest] == ["assistant", "tool"] * len(made) + ["assistant"]


def test_services_have_up_to_sixteen_tools_and_begin_small():
    sizes = {len(drawn.tools) for drawn in drawn_episodes()}
    assert max(sizes) == 16 and min(sizes) == 1
    small = drawn_episodes(level=0.0)
    assert max(len(drawn.tools) for drawn in small) <= 3
    assert all(len(json.loads(call["arguments"])) == 1 for drawn in small for call in calls(drawn))


def test_all_types_errors_and_chains_occur():
    text = "".join(json.dumps([drawn.tools, drawn.messages]) for drawn in drawn_episodes(400))
    for part in (
        '"array"',
        '"boolean"',
        '"object"',
        '"enum"',
        '"number"',
        "Error: ",
        "https://",
        "@",
        "/",
        "true",
        "false",
    ):
        assert part in text
    first_of_two = [drawn for drawn in drawn_episodes(400, requests=1) if len(calls(drawn)) == 2]
    assert len(first_of_two) > 20


def argument_names(tools):
    return {name for tool in tools for name in tool["parameters"].get("properties", {})}


def test_no_tool_of_a_real_server_is_in_the_episodes_and_no_argument_of_several_words():
    servers = [json.loads(file.read_text()) for file in SERVERS]
    assert len(servers) == 5
    real = [tool for server in servers for tool in server["tools"]]
    drawn = [tool["function"] for each in drawn_episodes(1500, level=1.6) for tool in each.tools]
    assert len({tool["name"] for tool in real}) == 50
    assert not {tool["name"] for tool in real} & {tool["name"] for tool in drawn}
    compounds = {name for name in argument_names(real) if len(words_of(name)) > 1}
    assert len(compounds) > 15
    assert not compounds & argument_names(drawn)


def test_open_requests_leave_the_choice_among_tools_of_the_same_types_only():
    for drawn in drawn_episodes(400, level=1.6):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in drawn.tools}
        for completion in (call for turn in drawn.turns for call in turn.calls):
            call = json.loads(completion.split("<tool_call>\n")[1].split("\n</tool_call>")[0])
            properties = schemas[call["name"]]["properties"]
            assert all(fits(value, properties[name]) for name, value in call["arguments"].items())


def test_an_error_is_corrected_with_the_value_that_it_names():
    corrected = 0
    for drawn in drawn_episodes(400):
        for before, error, after in zip(drawn.messages, drawn.messages[1:], drawn.messages[2:], strict=False):
            if not error["content"].startswith("Error: ") or "tool_calls" not in after:
                continue
            first, second = (json.loads(each["tool_calls"][0]["function"]["arguments"]) for each in (before, after))
            changed = [name for name in second if first[name] != second[name]]
            corrected += 1
            assert all(str(second[name]) in error["content"] for name in changed)
            assert len(changed) <= 1
    assert corrected > 20


def test_what_the_policy_copies_before_a_call_is_a_part_of_a_tools_line():
    for drawn in drawn_episodes():
        text = TOKENIZER.apply_chat_template(drawn.messages, tools=drawn.tools, tokenize=False)
        lines = text.split("</tools>")[0].splitlines()
        for completion in (call for turn in drawn.turns for call in turn.calls):
            assert any(completion.removeprefix("<think>").split("</think>")[0] in line for line in lines)
        for tool in drawn.tools:
            shown = f"({signature(tool['function']['parameters'])})"
            assert any(line.endswith(shown) for line in lines)


@pytest.mark.parametrize("name", ["max_count", "max-count", "maxCount"])
def test_the_words_of_a_name_are_the_same_in_every_style(name: str):
    assert words_of(name) == ["max", "count"]


def test_a_tool_named_by_one_of_its_words_is_copied_from_there():
    tools = (ServiceTool("find_old_boats", ()), ServiceTool("find_cars", ()))
    for seed in range(100):
        named = naming(random.Random(seed), tools[0], tools)
        said = named.text.replace("_", " ").split()
        assert set(said) - {"the", "a", "my"} <= {"find", "old", "boats"}
        assert tools[0].name[named.begin :] in ("find_old_boats", "old_boats", "boats")


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_has_the_same_tokens_in_a_request_as_in_a_call(kind: str):
    for seed in range(60):
        value = KINDS[kind][1](WordSource(random.Random(seed), held_out=False))
        shown = flat(value)[0]
        alone = TOKENIZER(shown).input_ids
        call = json.dumps({"a": value, "b": [value]})
        for text in (
            f"the {shown} now",
            f'"{shown}"',
            f"'{shown}'",
            f"`{shown}`.",
            f"x={shown}?",
            f"x: {shown}, y",
            call,
        ):
            ids = TOKENIZER(text).input_ids
            assert any(ids[at : at + len(alone)] == alone for at in range(len(ids))), (text, shown)
