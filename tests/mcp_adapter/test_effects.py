"""Which tools may write, read from names, descriptions and arguments."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mcp.types import ToolAnnotations

from offbook_mcp import ToolKind
from offbook_mcp.tools.effects import tool_kind

LABELLED = Path(__file__).parent / "listed" / "labelled.tsv"
"""Tools of public servers, with what their calls do to the server as read from their documentation."""
NUMBER, TEXT = {"type": "number"}, {"type": "string"}


def labelled() -> list[tuple[str, str, str, dict[str, object]]]:
    """(label, name, begin of the description, properties) of each tool."""
    rows = [line.split("\t") for line in LABELLED.read_text(encoding="utf-8").splitlines()[1:]]
    return [(label, name, begin, properties(arguments)) for label, _, name, begin, arguments in rows]


def properties(arguments: str) -> dict[str, object]:
    """`url width:number` -> the schemas of two arguments."""
    parts = [argument.partition(":") for argument in arguments.split()]
    return {name: {"type": kind or "string"} for name, _, kind in parts}


@pytest.mark.parametrize("with_descriptions", [True, False])
def test_no_writing_tool_of_public_servers_is_taken_for_a_reading_one(with_descriptions: bool) -> None:
    taken = {
        name: tool_kind(name, None, begin if with_descriptions else "", arguments)
        for label, name, begin, arguments in labelled()
        if label == "write"
    }
    assert [name for name, kind in taken.items() if kind is ToolKind.READ] == []


def test_most_reading_tools_of_public_servers_are_called_without_a_question() -> None:
    kinds = Counter(tool_kind(name, None, begin, args) for label, name, begin, args in labelled() if label == "read")
    assert kinds.total() > 150
    assert kinds[ToolKind.READ] / kinds.total() > 0.9
    assert kinds[ToolKind.WRITE] + kinds[ToolKind.DELETE] <= 1


@pytest.mark.parametrize(
    ("name", "hints", "kind"),
    [
        ("delete_everything", {"read_only_hint": True}, "read"),  # the annotation decides
        ("create_branch", {"read_only_hint": False, "destructive_hint": False}, "write"),
        ("write_file", {"read_only_hint": False, "destructive_hint": True}, "delete"),
        ("git_reset", {"read_only_hint": False}, "delete"),
        ("frobnicate", {"destructive_hint": True}, "delete"),
        ("frobnicate", {"destructive_hint": False}, "unknown"),
        ("get_weather", {"title": "Weather"}, "read"),
    ],
)
def test_annotations_decide(name: str, hints: Any, kind: str) -> None:
    assert tool_kind(name, ToolAnnotations(**hints)) == ToolKind(kind)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("get_order", "read"),
        ("get_post", "read"),
        ("get_book", "read"),
        ("get_schedule", "read"),
        ("git_show_commit", "read"),
        ("list_open_issues", "read"),
        ("searchIssues", "read"),
        ("order_search", "read"),
        ("stock_price", "read"),
        ("cancel_order", "write"),
        ("order_create", "write"),
        ("get_or_create", "write"),
        ("search_and_replace", "write"),
        ("list-and-delete", "delete"),
        ("deleteUser", "delete"),
        ("todo_list_add", "unknown"),
        ("mark_all_notifications_read", "unknown"),
        ("archive_list", "unknown"),
        ("order", "unknown"),
        ("post_message", "unknown"),
        ("frobnicate", "unknown"),
        ("查询价格", "unknown"),
    ],
)
def test_words_have_a_place_in_a_name(name: str, kind: str) -> None:
    assert tool_kind(name) == ToolKind(kind)


@pytest.mark.parametrize(
    ("name", "description", "kind"),
    [
        ("weather", "Current weather of a city.", "read"),
        ("weather", "Weather for a city", "read"),
        ("order_status", "The status of an order.", "read"),
        ("schedule", "Returns the schedule of a team.", "read"),
        ("schedule", "Schedules a meeting.", "write"),
        ("post_message", "Post a message to a channel.", "write"),
        ("department", "Which department a person works in.", "read"),
        ("department", "This tool will return the department.", "read"),
        ("frobnicate", "Frobnicates the widget.", "unknown"),
        ("get_user", "Deletes a user and returns it.", "unknown"),
        ("list_orders", "List orders and cancel the old ones.", "unknown"),
        ("update_view", "Shows the updated view.", "unknown"),
        ("todo_list_add", "Adds an item to a list.", "write"),
    ],
)
def test_the_description_decides_where_the_name_does_not(name: str, description: str, kind: str) -> None:
    assert tool_kind(name, None, description) == ToolKind(kind)


@pytest.mark.parametrize(
    ("name", "description", "arguments", "kind"),
    [
        ("query", "Search the catalogue.", {"text": TEXT}, "read"),
        ("query", "Run SQL on the database.", {"sql": TEXT}, "unknown"),
        ("query", "Run a read-only SQL query.", {"sql": TEXT}, "read"),
        ("query", "Runs SQL; this is not read-only.", {"sql": TEXT}, "unknown"),
        ("compound_interest", "", {"principal": NUMBER, "rate": NUMBER, "years": NUMBER}, "read"),
        ("wind_chill", "Wind chill.", {"temperature_c": NUMBER, "speed": NUMBER}, "read"),  # quantities name nothing
        ("teleport", "Teleports the robot.", {"x": NUMBER, "y": NUMBER}, "unknown"),
        ("redeem", "Redemption.", {"order_number": NUMBER, "amount": NUMBER}, "unknown"),
        ("add", "Add two numbers.", {"a": NUMBER, "b": NUMBER}, "read"),
        ("add", "Add an item.", {"item": TEXT}, "write"),
    ],
)
def test_arguments_count(name: str, description: str, arguments: dict[str, object], kind: str) -> None:
    assert tool_kind(name, None, description, arguments) == ToolKind(kind)
