"""`replayed_tools`: an app's tools answer what was recorded, and nothing is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, ToolMessage
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import InjectedState, ToolNode

from offbook.base.errors import ConfigError
from offbook_langgraph import replayed_tools

Row = dict[str, Any]


def cancel(order: str, reason: str = "none", state: Annotated[Any, InjectedState] = None) -> str:
    """Cancel an order."""
    raise AssertionError("a replayed tool is not run")


def conversation(*results: tuple[str, str, str]) -> Row:
    """A row in which these tools were called, with (name, arguments, result)."""
    messages: list[Row] = [{"role": "user", "content": "please"}]
    for number, (name, arguments, result) in enumerate(results):
        call = {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": result},
        ]
    return {"messages": [*messages, {"role": "assistant", "content": "done"}]}


async def answers(tools: Any, *calls: tuple[str, Row]) -> list[ToolMessage]:
    """What a graph's tool node answers."""
    graph = StateGraph(MessagesState).add_node("tools", ToolNode(tools))
    graph.set_entry_point("tools")
    asked = [{"name": name, "args": arguments, "id": str(place)} for place, (name, arguments) in enumerate(calls)]
    said = AIMessage("", tool_calls=asked)
    return (await graph.compile().ainvoke({"messages": [said]}))["messages"][1:]


async def test_the_same_arguments_get_the_recorded_result_and_others_a_failed_one(tmp_path: Path) -> None:
    rows = [
        conversation(("cancel", '{"order": "7"}', "cancelled, older")),
        conversation(
            ("cancel", '{"order": "7", "reason": "none"}', "cancelled"), ("cancel", '{"order": "7"}', "it is already")
        ),
        conversation(("other", '{"order": "8"}', "of another tool"), ("cancel", '{"order": 8}', "of a faulty call")),
    ]
    file = tmp_path / "all.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tools = replayed_tools([cancel], file)
    assert (tools[0].name, tools[0].description) == ("cancel", "Cancel an order.")
    assert list(tools[0].args) == ["order", "reason"]
    known, unknown = await answers(tools, ("cancel", {"order": "7"}), ("cancel", {"order": "8"}))
    assert (known.content, known.status) == ("cancelled", "success")
    assert unknown.status == "error" and 'no result is recorded for the arguments {"order": "8", "reason"' in str(
        unknown
    )


def test_a_tool_that_was_never_called_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no result of cancel in 1 conversations: record traffic that calls it"):
        replayed_tools([cancel], [conversation(("other", "{}", "x"))])
