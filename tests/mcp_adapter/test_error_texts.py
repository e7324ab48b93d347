"""Errors that servers return as ordinary text are no results: no task asks for them."""

from __future__ import annotations

import json

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

from offbook.base.errors import ConfigError
from offbook_mcp import Target
from offbook_mcp.scenarios import execution
from offbook_mcp.scenarios.execution import REFUSED_AS_TEXT, Control, reads_like_error
from offbook_mcp.scenarios.generate import generate_scenarios
from offbook_mcp.tools.rollout_tools import ToolResult
from tests.mcp_adapter.test_scenarios_llm import answers, made, scenario, written

READS = ToolAnnotations(read_only_hint=True)
WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=False)
STOCK = {"bolt": 40, "nut": 7, "washer": 12, "pin": 3, "hinge": 9}


@pytest.fixture(autouse=True)
def _runs_close_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "APART_SECONDS", 0.01)


def is_error(text: str, tool: str = "query", control: Control | None = None, **arguments: object) -> bool:
    return reads_like_error(tool, arguments, ToolResult(text), control)


@pytest.mark.parametrize(
    "text",
    [
        "Parser Error: syntax error at or near 'amber'",  # DuckDB
        "Database error: no such table: parts",  # mcp-server-sqlite
        "sqlite3.OperationalError: near 'x': syntax error",
        "Error executing tool get_order: 'amber'",
        "Error: 404",
        "ERROR - no connection",
        "Not authenticated",
        "Please log in first.",
        "401 Unauthorized",
        "HTTP 503",
        "Permission denied: you need the role editor",
        "API key is missing",
        "Rate limit exceeded, try again later",
        "Failed to fetch the page",
        "Traceback (most recent call last):\n  File 'a.py'\nKeyError: 'x'",
        '{"error": "no such order"}',
        '{"success": false, "message": "no such order"}',
        '{"status": "error"}',
        '{"status": "failed", "reason": "no such order"}',
        "{'error': 'no such order'}",
        '[{"error": "no such order"}]',
        "错误: 没有这个订单",
        "ENOENT: no such file or directory, open 'a'",
    ],
)
def test_an_error_as_text_is_recognised(text: str) -> None:
    assert is_error(text)


@pytest.mark.parametrize(
    "text",
    [
        "The error rate is 3 %",
        "40 bolts",
        "Terror: a film",
        '{"id": 7, "status": "failed", "item": "bolt"}',
        '{"id": 7, "error": "timeout", "state": "done", "retries": 2}',
        '{"error": null, "rows": 3}',
        '{"success": true}',
        "Commit: 'abc'\nMessage: 'Error: handle it'",
        "You can not park here.",
        "Row 1\n" * 200 + "Error: in a long text",
    ],
)
def test_a_result_that_speaks_of_errors_is_a_result(text: str) -> None:
    assert not is_error(text)


def test_texts_of_the_arguments_and_of_tools_about_errors_are_not_errors() -> None:
    assert not is_error("Not authenticated", "echo", message="Not authenticated")
    assert not is_error("Error: disk full", "read_log")


def test_a_complaint_that_nonsense_gets_too_is_an_error() -> None:
    control = Control({"city": "zq-nothing-has-this-name", "unit": "c"}, "Unknown city zq-nothing-has-this-name in c")
    assert is_error("Unknown city Oslo in f", "weather", control, city="Oslo", unit="f")
    assert not is_error("Oslo: 14 f", "weather", control, city="Oslo", unit="f")


def store(folder: object = None) -> MCPServer:
    """A server without error flags: `query` has a syntax, `order` wants a login, and only `count` answers."""
    server = MCPServer("store")

    @server.tool(annotations=READS)
    def count(item: str) -> str:
        """Count an item: bolt, nut, washer, pin or hinge. Items: bolt, nut, washer, pin, hinge"""
        return f"{STOCK[item]} in stock" if item in STOCK else f"Unknown item {item}"

    @server.tool(annotations=READS)
    def query(sql: str) -> str:
        """Run a query."""
        return f"Parser Error: syntax error near {sql[:6]!r}"

    @server.tool(annotations=READS)
    def account() -> str:
        """Show the account."""
        return "Not authenticated"

    @server.tool(annotations=WRITES)
    def order(item: str) -> str:
        """Order an item."""
        return "Not authenticated"

    return server


async def test_no_scenario_has_an_error_as_its_answer_and_the_text_is_shown() -> None:
    scenarios = await generate_scenarios(Target.parse(store, allow_all=True), count=12)
    assert {tool for each in scenarios.scenarios for tool in each.tools} == {"count"}
    assert scenarios.dropped[REFUSED_AS_TEXT] > 0
    assert any(
        text in scenarios.examples[REFUSED_AS_TEXT] for text in ("Parser Error", "Not authenticated", "Unknown item")
    )


async def test_where_every_call_gets_an_error_as_text_the_error_shows_it() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)no call of account worked: .*Not authenticated.*no call of query worked"
    ):
        await generate_scenarios(Target.parse(store, only=("query", "account")), count=4)


async def test_a_written_scenario_whose_call_gets_an_error_as_text_is_dropped() -> None:
    batch = [
        scenario("How many bolts?", ("count", json.dumps({"item": "bolt"}))),
        scenario("Who sells bolts?", ("query", json.dumps({"sql": "who"}))),
        scenario("Order a bolt.", ("order", json.dumps({"item": "bolt"}))),
    ]
    scenarios, _ = await made([written(*batch), answers((1, ["40"])), written()], 3, store, allow_all=True)
    assert [each.task for each in scenarios.scenarios] == ["How many bolts?"]
    assert scenarios.dropped[REFUSED_AS_TEXT] == 2
