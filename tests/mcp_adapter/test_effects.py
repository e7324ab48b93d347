"""What a tool's words suggest: this ticks a question, and permits nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mcp.types import ToolAnnotations

from offbook_mcp.tools.tool import ToolKind, suggested_kind

LABELLED = Path(__file__).parent / "listed" / "labelled.tsv"
"""Tools of public servers, with what their calls do to the server as read from their documentation."""


def test_no_writing_tool_of_public_servers_is_ticked_and_most_reading_ones_are() -> None:
    rows = [line.split("\t") for line in LABELLED.read_text(encoding="utf-8").splitlines()[1:]]
    kinds = Counter((label, suggested_kind(name, begin).value) for label, _, name, begin, _ in rows)
    assert kinds["write", "read"] == 0
    assert kinds["read", "read"] > 0.9 * sum(number for (label, _), number in kinds.items() if label == "read")


@pytest.mark.parametrize(
    ("name", "hints", "kind"),
    [
        ("delete_everything", {"read_only_hint": True}, "read"),  # the annotation decides
        ("list_branches", {"read_only_hint": False, "destructive_hint": False}, "write"),
        ("frobnicate", {"destructive_hint": True}, "write"),
        ("frobnicate", {"destructive_hint": False}, "unknown"),
        ("get_weather", {"title": "Weather"}, "read"),
    ],
)
def test_annotations_decide(name: str, hints: Any, kind: str) -> None:
    assert suggested_kind(name, "", ToolAnnotations(**hints)) == ToolKind(kind)


@pytest.mark.parametrize(
    ("name", "description", "kind"),
    [
        ("get_order", "", "read"),
        ("searchIssues", "", "read"),
        ("git_show_commit", "", "read"),
        ("cancel_order", "", "write"),
        ("get_or_create", "", "write"),
        ("deleteUser", "", "write"),
        ("give_refund", "Gives somebody their money back.", "write"),
        ("validate_coupon", "Validates a coupon and uses it.", "write"),
        ("get_next_job", "Returns the next job, and marks it as taken.", "write"),
        ("filter_spam", "Filters spam, permanently.", "write"),
        ("get_user", "Deletes a user and returns it.", "write"),
        ("department", "This person's department.", "unknown"),
        ("查询价格", "", "unknown"),
    ],
)
def test_verbs_of_the_name_and_of_every_clause_count(name: str, description: str, kind: str) -> None:
    assert suggested_kind(name, description) == ToolKind(kind)
