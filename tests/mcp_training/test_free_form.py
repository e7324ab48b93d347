"""SQL, expressions and code are judged by what the call returned, on a real database."""

from __future__ import annotations

import json
import sqlite3

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from offbook_mcp import McpScenario, ServerPool, Target
from offbook_mcp.scenarios import execution
from offbook_mcp.tools.tool import Schema, ServerTool
from offbook_mcp.tools.toolset import ModelTool
from offbook_mcp.training.rewards import PolicyCall, ToolEpisode, free_form_arguments, result_digest, same_code, score
from tests.mcp_adapter.test_scenarios_llm import answers, made, scenario, written

READS = ToolAnnotations(read_only_hint=True)
QUERY = "SELECT name FROM parts WHERE stock > 5 AND name <> 'none of these parts at all' ORDER BY name"


def database(folder: object = None) -> MCPServer:
    """A table of parts, which SQL reads, and SQL changes without a result that shows what."""
    server = MCPServer("database")
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("CREATE TABLE parts (name TEXT, stock INTEGER)")
    connection.executemany("INSERT INTO parts VALUES (?, ?)", [("bolt", 40), ("nut", 7), ("pin", 3)])

    @server.tool(annotations=READS)
    def read_query(sql: str, limit: int = 100) -> str:
        """Run a SELECT query."""
        try:
            return repr(connection.execute(sql).fetchmany(limit))
        except sqlite3.Error as error:
            raise ToolError(f"Database error: {error}") from error

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=False))
    def write_query(sql: str) -> str:
        """Run an INSERT or UPDATE."""
        return f"{connection.execute(sql).rowcount} row"

    return server


async def reference() -> McpScenario:
    batch = written(scenario("Which parts have more than 5 in stock?", ("read_query", json.dumps({"sql": QUERY}))))
    scenarios, _ = await made([batch, answers((1, ["bolt", "nut"])), written()], 1, database)
    [kept] = scenarios.scenarios
    return kept


@pytest.fixture(autouse=True)
def _runs_close_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "APART_SECONDS", 0.01)


@pytest.mark.parametrize(
    ("sql", "match"),
    [
        (QUERY, 1.0),
        ("select name as part from parts where stock >= 7", 1.0),
        ("SELECT name FROM parts WHERE name IN ('nut', 'bolt')", 1.0),
        ("SELECT name FROM parts", 0.0),
        ("SELECT name, stock FROM parts WHERE stock > 5", 0.0),
        (QUERY.replace("stock", "stick"), 0.0),  # fails
    ],
)
async def test_a_query_is_worth_what_it_returned(sql: str, match: float) -> None:
    task = await reference()
    assert task.calls[0].arguments == {"sql": QUERY} and len(QUERY) > 63 and task.calls[0].returned
    async with ServerPool(Target.parse(database)) as pool, pool.rollout() as tools:
        result = await tools.call("read_query", {"sql": sql})
        tool = pool.toolset.find("read_query")
        assert tool is not None
        call = PolicyCall("read_query", {"sql": sql}, 0, result.is_error, result_digest(tools, tool, result))
        scored = score(task, ToolEpisode((call,), "bolt and nut"), pool.toolset)
    assert scored.metrics["argument_match"] == match
    assert scored.reward == pytest.approx(1.0 if match else 0.2)


async def test_what_no_result_settles_is_compared_by_its_spelling_and_a_failure_is_worth_nothing() -> None:
    wanted = "UPDATE parts SET stock = 5 WHERE name = 'nut'"
    task = McpScenario.model_validate({
        "id": "a", "task": "do", "difficulty": 1, "tools": ["write_query"], "check": "calls",
        "calls": [{"tool": "write_query", "arguments": {"sql": wanted}}],
    })  # fmt: skip
    async with ServerPool(Target.parse(database, allow_all=True)) as pool:
        for sql, failed, match in [
            ("update parts set stock=5\nwhere name='nut';", False, 1.0),
            ("UPDATE parts SET stock = 6 WHERE name = 'nut'", False, 0.0),
            (wanted, True, 0.0),
        ]:
            call = PolicyCall("write_query", {"sql": sql}, 0, failed)
            assert score(task, ToolEpisode((call,), "done"), pool.toolset).metrics["argument_match"] == match


@pytest.mark.parametrize(
    ("name", "schema", "free"),
    [
        ("sql", {}, True),
        ("searchQuery", {}, True),
        ("query_string", {}, True),
        ("code", {}, True),
        ("python_code", {}, True),
        ("queries", {"type": "array", "items": {"type": "string"}}, True),
        ("input", {"description": "The arithmetic expression"}, True),
        ("currency_code", {}, False),
        ("query_id", {}, False),
        ("query", {"enum": ["a", "b"]}, False),
        ("query", {"type": "integer"}, False),
        ("name", {}, False),
    ],
)
def test_arguments_in_a_language_are_known_by_their_names_and_descriptions(
    name: str, schema: Schema, free: bool
) -> None:
    parameters: Schema = {"type": "object", "properties": {name: {"type": "string", **schema}}}
    tool = ModelTool("t", ServerTool("s", "t", "", parameters), parameters)
    assert free_form_arguments(tool) == (frozenset([name]) if free else frozenset())


def test_code_is_the_same_up_to_white_space_case_and_a_final_semicolon() -> None:
    assert same_code("SELECT a,b FROM t", "select a, b\nfrom t ;")
    assert not same_code("SELECT 'A'", "SELECT 'a'")
    assert not same_code("1 + 2", "1 - 2")
