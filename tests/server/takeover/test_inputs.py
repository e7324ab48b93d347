"""What calls of every API bring: names of tools, and results of tools that say that they failed."""

from __future__ import annotations

from typing import Any

import pytest

from offbook.server.takeover.inputs import failed_results

ASKED: dict[str, Any] = {"role": "user", "content": "Error: this is what my screen says"}
CALLED: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "1", "content": content}


def block(**result: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"} | result]}


def response(value: Any) -> dict[str, Any]:
    return {"role": "user", "parts": [{"functionResponse": {"name": "look_up", "response": value}}]}


@pytest.mark.parametrize(
    ("body", "failed"),
    [
        ({"messages": [ASKED]}, []),
        ({"messages": [ASKED, CALLED, tool("shipped")]}, [False]),
        ({"messages": [ASKED, CALLED, tool("Error: no connection")]}, [True]),
        ({"messages": [ASKED, CALLED, tool("Error"), tool("shipped")]}, [False, True]),
        ({"messages": [ASKED, CALLED, tool("Error"), CALLED, tool("shipped")]}, [False]),
        ({"messages": [ASKED, CALLED, tool([{"type": "text", "text": "Error: no"}])]}, [True]),
        ({"messages": [ASKED, CALLED, tool('{"error": "no connection"}')]}, [True]),
        ({"messages": [ASKED, CALLED, tool('{"error": null, "total": 3}')]}, [False]),
        ({"messages": [ASKED, CALLED, tool('{"isError": true}')]}, [True]),
        ({"messages": [ASKED, CALLED, tool("{no json")]}, [False]),
        ({"messages": [ASKED, CALLED, tool(None)]}, [False]),
        ({"messages": [ASKED, CALLED, block(content="shipped")]}, [False]),
        ({"messages": [ASKED, CALLED, block(content="no connection", is_error=True)]}, [True]),
        ({"contents": [response({"status": "shipped"})]}, [False]),
        ({"contents": [response({"error": "no connection"})]}, [True]),
        ({"input": "Error: this is what my screen says"}, []),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "Error: no connection"}]}, [True]),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "shipped"}]}, [False]),
        ({"messages": 3}, []),
        ({"messages": [3, None, {"content": 3}]}, []),
        ({}, []),
    ],
)
def test_the_newest_results_of_tools_are_read_in_every_api(body: dict[str, Any], failed: list[bool]) -> None:
    assert failed_results(body) == failed
