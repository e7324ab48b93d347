"""Values that only a description or an error message lists."""

from __future__ import annotations

import time

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

from offbook_mcp import Target
from offbook_mcp.scenarios import execution
from offbook_mcp.scenarios.generate import generate_scenarios
from offbook_mcp.scenarios.harvest import lists_in, values_for

READS = ToolAnnotations(read_only_hint=True)
ROWS = {"zusers": "4 rows", "zorders": "9 rows", "zparcels": "12 rows"}
DEPOTS = {"osl-1": "open", "brg-2": "shut", "trd-3": "full"}


@pytest.mark.parametrize(
    ("text", "label", "values"),
    [
        ("Known cities: New York, Oslo and Rome.", ("known", "city"), ("New York", "Oslo", "Rome")),
        ("unknown table 'x'; tables: users, orders", ("table",), ("users", "orders")),
        ("Unknown region 'q'. Available regions are 'north', 'south'.", ("available", "region"), ("north", "south")),
        ("'x' is not one of ['a', 'b']", (), ("a", "b")),
        ("The unit, one of metric, imperial (default metric)", (), ("metric", "imperial")),
        ("level: low | mid | high", ("level",), ("low", "mid", "high")),
    ],
)
def test_a_list_is_read_with_its_label(text: str, label: tuple[str, ...], values: tuple[str, ...]) -> None:
    [listed] = lists_in(text)
    assert (listed.label, listed.values) == (label, values)


@pytest.mark.parametrize(
    "text",
    [
        "Returns the weather of a city, a country, or a region.",
        "Note: this tool reads many files, and writes them to the disk, if possible.",
        "Query one of the tables that exist, or all",
        "Deprecated.",
    ],
)
def test_a_sentence_is_no_list(text: str) -> None:
    assert list(lists_in(text)) == []


def test_a_hostile_text_is_read_in_no_time() -> None:
    began = time.monotonic()
    for text in ("x: " + "a or " * 9_999 + "!", "a: " * 9_999, "one of " * 9_999, "a" * 99_999, "a-" * 9_999):
        list(lists_in(text))
    assert time.monotonic() - began < 5


def test_only_what_describes_an_argument_is_its_value() -> None:
    about = "Forecasts.\n\nArgs:\n    city: The city, one of Paris, Oslo\n    unit: one of c, f\n"
    assert values_for("city", "", about) == ["Paris", "Oslo"]
    assert values_for("unit", "", about) == ["c", "f"]
    assert values_for("city_name", "", about) == []


def make(folder: object = None) -> MCPServer:
    """A database whose tables only its error names, and depots that only a tool's description names."""
    server = MCPServer("stock")

    @server.tool(annotations=READS)
    def count_rows(table: str) -> str:
        """Count the rows of a table."""
        if table not in ROWS:
            raise ToolError(f"unknown table {table!r}; tables: {', '.join(ROWS)}")
        return ROWS[table]

    @server.tool(annotations=READS, description=f"The state of a depot. Known depots: {', '.join(DEPOTS)}")
    def depot_state(depot: str) -> str:
        if depot not in DEPOTS:
            raise ToolError("no such depot")
        return DEPOTS[depot]

    return server


async def test_values_that_only_an_error_or_a_description_lists_make_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "APART_SECONDS", 0.01)
    scenarios = await generate_scenarios(Target.parse(make), count=12, seed=5)
    calls = [call for scenario in scenarios.scenarios for call in scenario.calls]
    assert {call.arguments["table"] for call in calls if call.tool == "count_rows"} == set(ROWS)
    assert {call.arguments["depot"] for call in calls if call.tool == "depot_state"} == set(DEPOTS)
