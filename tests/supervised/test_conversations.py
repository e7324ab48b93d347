"""Training examples of files, lists and data sets: what is read, and how each fault is named with its row and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbook.base.errors import ConfigError
from offbook.base.redaction import MARK
from offbook.supervised.conversations import read_conversations

SYSTEM = {"role": "system", "content": "You file tickets."}
ASK = {"role": "user", "content": "The printer burns."}
SAY = {"role": "assistant", "content": "Call the fire brigade."}
TOOL = {"type": "function", "function": {"name": "file", "parameters": {"type": "object"}}}


def call(name: str = "file", arguments: Any = '{"title": "fire"}', call_id: str | None = "c1") -> dict[str, Any]:
    said = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return said if call_id is None else said | {"id": call_id}


def calls(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(items), **fields}


def result(call_id: str | None = "c1") -> dict[str, Any]:
    return {"role": "tool", "content": "filed"} | ({} if call_id is None else {"tool_call_id": call_id})


def fault(row: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_conversations([row])
    return str(caught.value).splitlines()[0].removeprefix("row 0: ")


def file_of(folder: Path, content: str | bytes, name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def file_fault(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_conversations(file)
    return str(caught.value)


# ---- what is read


def test_a_file_as_openai_takes_it_is_read(tmp_path: Path) -> None:
    rows = [
        {"messages": [SYSTEM, ASK, SAY | {"weight": 0}, ASK, SAY | {"weight": 1, "refusal": None}]},
        {"messages": [ASK, calls(call(), call(call_id="c2")), result("c2"), result(), SAY], "tools": [TOOL]},
        {"messages": [ASK, calls(call())], "tools": [TOOL], "parallel_tool_calls": False},
    ]
    read = read_conversations(file_of(tmp_path, "\n".join(map(json.dumps, rows)) + "\n\n"))
    weighted, with_results, ends_in_call = read.conversations
    assert weighted.messages == (SYSTEM, ASK, SAY, ASK, SAY)
    assert (weighted.weights, weighted.tools, weighted.source) == ({2: 0.0, 4: 1.0}, None, "data.jsonl, line 1")
    assert (with_results.tools, with_results.weights) == ((TOOL,), {})
    assert with_results.messages[2:4] == (result(), result("c2"))  # in the order of the calls
    assert ends_in_call.messages[-1] == calls(call())
    assert (read.skipped, read.faults, read.redacted) == (0, (), 0)


def test_rows_of_other_forms_are_converted() -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    rows = [
        {"conversations": turns, "system": "Be brief.", "id": "identity_0"},
        {"prompt": "hi", "completion": "hello"},
        {"prompt": [ASK, SAY, ASK], "completion": [SAY]},
        [ASK, SAY],
        {"prompt": "hi", "prompt_id": "f0e3", "messages": [ASK, SAY]},
    ]
    read = read_conversations(rows)
    said = [[(message["role"], message["content"]) for message in item.messages] for item in read.conversations]
    assert said[0] == [("system", "Be brief."), ("user", "hi"), ("assistant", "hello")]
    assert said[1] == [("user", "hi"), ("assistant", "hello")]
    assert read.conversations[2].weights == {1: 0.0}  # the completion alone is trained
    assert said[3] == said[4] == [("user", ASK["content"]), ("assistant", SAY["content"])]


def test_tools_of_a_column_of_text_and_calls_without_ids_are_read() -> None:
    """As public data sets of tool calls have them: a row's tools as text of JSON, functions bare, results in order."""
    row = {
        "messages": [ASK, calls(call(call_id=None), call(call_id=None)), result(None), result(None), SAY],
        "tools": json.dumps([TOOL["function"]]),
    }
    [conversation] = read_conversations([row]).conversations
    assert conversation.tools == (TOOL,)


def test_a_hugging_face_data_set_is_read_without_arrows_padding() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [
        {"messages": [ASK, SAY], "tools": None},
        {"messages": [ASK, calls(call(arguments={"title": "fire"}))], "tools": [TOOL]},
        {"messages": [ASK, calls(call("close", {"ticket": 3}))], "tools": None},
    ]
    plain, called, _ = read_conversations(datasets.Dataset.from_list(rows)).conversations
    assert plain.messages == (ASK, SAY)
    assert called.messages[1]["tool_calls"] == [call(arguments={"title": "fire"})]
    assert (called.tools, called.source) == ((TOOL,), "row 1")


# ---- bad rows


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "hi"}, "messages: it is missing (the fields are 'text')"),
        ({"messages": "hi"}, "messages: a list is needed (got 'hi')"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": ["hi"]}, "messages.0: Input should be"),
        ({"messages": [ASK, {"role": "bot", "content": "x"}]}, "messages.1.role: Input should be 'system'"),
        ({"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content: Input should be a valid string (got 3)"),
        ({"messages": [{"role": "user"}, SAY]}, "messages.0.content: text is needed, since the role is 'user'"),
        ({"messages": [ASK]}, "messages: there is no assistant message"),
        ({"messages": [ASK, SAY | {"weight": 0}]}, "messages: each assistant message has the weight 0"),
        ({"messages": [SAY, ASK]}, "messages.0: the assistant speaks first"),
        ({"messages": [ASK, {"role": "assistant", "content": " "}]}, "messages.1: the assistant says nothing"),
        ({"messages": [ASK | {"weight": 1}, SAY]}, "messages.0.weight: only a message of the assistant has a weight"),
        (
            {"messages": [ASK, SAY | {"weight": -1}]},
            "messages.1.weight: a number from 0 (not trained) is needed (got -1)",
        ),
        ({"messages": [ASK, SAY | {"weight": True}]}, "messages.1.weight: a number from 0"),
        ({"messages": [ASK, SAY | {"weight": float("nan")}]}, "key 'messages'[1]['weight']: JSON has no nan"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, SAY]},
            "messages.0.content.0: only text is trained (got a part of type 'image_url')",
        ),
        ({"messages": [ASK, result(), SAY]}, "messages.1: a result of a tool, but no call of the assistant"),
        ({"messages": [ASK, calls(call()), result("c9")]}, "messages.2.tool_call_id: 'c9' is none of the calls"),
        ({"messages": [ASK, calls(call()), result(None)]}, "messages.2.tool_call_id: None is none of the calls"),
        (
            {"messages": [ASK, calls(call(), call(call_id="c2")), result(), result()]},
            "messages.3.tool_call_id: call 'c1' has a result already",
        ),
        (
            {"messages": [ASK, calls(call(), call(call_id="c2")), result(), SAY]},
            "messages.3: the assistant speaks before call 'c2' of the assistant has a result",
        ),
        ({"messages": [ASK, calls(call(), call())]}, "messages.1.tool_calls: the id 'c1' appears twice"),
        (
            {"messages": [ASK, calls(call(arguments='{"a": '))]},
            "messages.1.tool_calls.0.function.arguments: not JSON: ",
        ),
        (
            {"messages": [ASK, calls(call(arguments='{"a": NaN}'))]},
            "messages.1.tool_calls.0.function.arguments: not JSON: ",
        ),
        (
            {"messages": [ASK, calls(call(arguments="[1]"))]},
            "messages.1.tool_calls.0.function.arguments: a JSON object",
        ),
        ({"messages": [ASK, calls({"type": "function"})]}, "messages.1.tool_calls.0.function: Field required"),
        ({"messages": [ASK | {"tool_calls": [call()]}, SAY]}, "messages.0.tool_calls: only the assistant calls tools"),
        (
            {"messages": [ASK, calls(call("close"))], "tools": [TOOL]},
            "messages.1.tool_calls.0.function.name: 'close' is not among the tools file",
        ),
        ({"messages": [ASK, SAY], "tools": [{"type": "retrieval"}]}, "tools.0.type: Input should be 'function'"),
        ({"messages": [ASK, SAY], "tools": "[{"}, "tools: not JSON: "),
        (
            {"messages": [ASK, SAY], "functions": [{"name": "f"}]},
            "functions: write OpenAI's older functions as `tools`",
        ),
        ({"messages": [ASK, SAY | {"function_call": {"name": "file"}}]}, "messages.1.function_call: write it as"),
        (
            {"messages": [ASK, {"role": "function", "name": "file", "content": "x"}, SAY]},
            "messages.1.role: Input should be",
        ),
        (
            {"messages": [ASK, calls(call(), call(call_id="c2"))], "parallel_tool_calls": False},
            "messages.1.tool_calls: 2 calls, but parallel_tool_calls is false",
        ),
        ({"messages": [ASK, SAY], "parallel_tool_calls": "no"}, "parallel_tool_calls: Input should be a valid boolean"),
        ({"conversations": [{"from": "observation", "value": "x"}]}, "conversations.0.from: one of system, human,"),
        (
            {"messages": [{"role": "user", "content": "half \ud83d"}, SAY]},
            "key 'messages'[0]['content']: half a character",
        ),
        ("hi", "an object is needed, got str"),
    ],
)
def test_a_bad_row_is_named_with_its_field(row: Any, message: str) -> None:
    assert fault(row).startswith(message)


def test_what_is_not_trained_may_be_of_any_kind() -> None:
    silent = {"role": "assistant", "content": "", "weight": 0}
    row = {
        "messages": [SAY | {"weight": 0}, ASK, silent, calls(call("close"), weight=0), result(), SAY],
        "tools": [TOOL],
    }
    [conversation] = read_conversations([row]).conversations
    assert conversation.weights == {0: 0.0, 2: 0.0, 3: 0.0}


# ---- bad files


def test_faults_of_a_file_are_named_with_their_lines_and_skipped_when_that_is_wanted(tmp_path: Path) -> None:
    good = json.dumps({"messages": [ASK, SAY]})
    latin = json.dumps({"messages": [{"role": "user", "content": "café"}, SAY]}, ensure_ascii=False).encode("latin-1")
    weight = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": NaN}]}'
    lines = [
        good.encode(),
        good[:-9].encode(),
        b"[1]",
        latin,
        weight.encode(),
        json.dumps({"messages": [ASK]}).encode(),
    ]
    file = file_of(tmp_path, b"\xef\xbb\xbf" + b"\n".join(lines))
    *faults, advice = file_fault(file).splitlines()
    assert advice == "skip_bad=True (--skip-bad) leaves such rows out and counts them"
    assert [line.split(": ")[0] for line in faults] == [f"data.jsonl, line {n}" for n in range(2, 7)]
    assert "not JSON" in faults[0]
    assert "an object is needed, got list" in faults[1]
    assert "not UTF-8: byte 0xe9" in faults[2]
    assert "JSON has no NaN" in faults[3]
    read = read_conversations(file, skip_bad=True)
    assert ([item.source for item in read.conversations], read.skipped) == (["data.jsonl, line 1"], 5)
    assert list(read.faults) == faults


def test_of_many_faults_the_first_are_named_and_the_others_counted(tmp_path: Path) -> None:
    read = read_conversations([[ASK], *([ASK] for _ in range(40)), [ASK, SAY]], skip_bad=True)
    assert (read.skipped, len(read.faults), read.faults[-1]) == (41, 21, "and 21 more")


def test_a_json_array_is_read_like_lines(tmp_path: Path) -> None:
    rows = [{"messages": [ASK, SAY]}, {"messages": [ASK]}, {"messages": [ASK, SAY]}]
    read = read_conversations(file_of(tmp_path, json.dumps(rows, indent=1), "data.json"), skip_bad=True)
    assert [item.source for item in read.conversations] == ["data.json, row 0", "data.json, row 2"]
    assert list(read.faults) == ["data.json, row 1: messages: there is no assistant message"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "label",
            False,
            "label: false marks an answer that must not be imitated",
        ),  # KTO: kto_en_demo.json of LLaMA-Factory
        (
            "rejected",
            {"from": "gpt", "value": "No."},
            "rejected: a pair of answers is no conversation",
        ),  # its dpo_en_demo.json
        ("images", ["1.jpg"], r"images: only text is trained \(got \['1.jpg'\]\)"),  # its mllm_demo.json
    ],
)
def test_a_row_that_must_not_be_imitated_as_text_is_refused(field: str, value: object, message: str) -> None:
    row = {"messages": [ASK, SAY], "label": True, "images": []}
    assert read_conversations([row]).conversations
    with pytest.raises(ConfigError, match=message):
        read_conversations([row | {field: value}])


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_file_without_a_conversation_is_refused(tmp_path: Path, skip_bad: bool) -> None:
    whole = json.dumps({"messages": [ASK, SAY]})
    cases: list[tuple[str | bytes, str, str]] = [
        ("", "a.jsonl", "it holds no conversation that can be trained"),
        ("\n \n", "b.jsonl", "it holds no conversation that can be trained"),
        (json.dumps({"messages": [ASK]}), "c.jsonl", "there is no assistant message"),
        (whole.encode("utf-16"), "d.jsonl", "is UTF-16; save it as UTF-8"),
        (
            f"[\n{whole}\n]",
            "e.jsonl",
            "begins with '[': an object a line is needed; one array goes into a file named .json",
        ),
        (whole, "f.json", "a JSON array of objects is needed, got dict"),
        (f"{whole}\n{whole}", "g.json", "; a file with an object a line ends in .jsonl"),
        ("[NaN]", "h.json", "JSON has no NaN"),
        ("[" * 100_000, "i.json", "nested too deeply"),
        (b"[\xe9]", "j.json", "not UTF-8: byte 0xe9 at 1"),
        (whole, "k.txt", "a file that ends in .jsonl or .json is needed"),
    ]
    for content, name, message in cases:
        with pytest.raises(ConfigError, match="(?s)" + ".*".join(map(_escaped, message.split("`")))):
            read_conversations(file_of(tmp_path, content, name), skip_bad=skip_bad)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_conversations(tmp_path / "missing.jsonl", skip_bad=skip_bad)


def _escaped(text: str) -> str:
    return "".join(f"\\{char}" if char in "[]().'" else char for char in text)


# ---- secrets


def test_secrets_are_masked_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    key = "sk-" + "a1" * 12
    login = call(arguments=json.dumps({"password": "hunter22", "url": "http://x/y", "mail": "bob@example.com"}))
    ordinary = call(arguments='{"title":  "fire"}')
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": f"use {key}"}]},
            calls(login, ordinary | {"id": "c2"}, content=f"I use {key}."),
        ]
    }
    read = read_conversations([row])
    [asked, answered] = read.conversations[0].messages
    assert asked["content"] == [{"type": "text", "text": f"use {MARK}"}]
    assert answered["content"] == f"I use {MARK}."
    masked = {"password": MARK, "url": "http://x/y", "mail": "bob@example.com"}
    assert json.loads(answered["tool_calls"][0]["function"]["arguments"]) == masked
    assert answered["tool_calls"][1]["function"]["arguments"] == '{"title":  "fire"}'
    assert read.redacted == 3
    monkeypatch.setenv("OFFBOOK_REDACT", "0")
    assert read_conversations([row]).redacted == 0


def test_a_filter_replaces_each_text_that_may_be_trained() -> None:
    row = {"messages": [ASK, calls(call()), result(), SAY | {"reasoning": "The printer."}], "tools": [TOOL]}
    read = read_conversations([row], filter=lambda text: text.replace("rinter", "lotter").replace("fire", "smoke"))
    asked, called, _, said = read.conversations[0].messages
    assert asked["content"] == "The plotter burns."
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"title": "smoke"}
    assert (said["content"], said["reasoning"]) == ("Call the smoke brigade.", "The plotter.")
    assert read.redacted == 4
    with pytest.raises(ConfigError, match="filter: it must return the text to keep, got None"):
        read_conversations([row], filter=lambda text: None)  # type: ignore[arg-type, return-value]
