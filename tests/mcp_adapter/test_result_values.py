"""Results in notations other than JSON: their values are read, make scenarios, and compare by what they say."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from offbook_mcp import Target
from offbook_mcp.connection.servers import InProcessServer, Limits
from offbook_mcp.scenarios import execution
from offbook_mcp.scenarios.generate import generate_scenarios
from offbook_mcp.scenarios.harvest import comma_list
from offbook_mcp.tools.result_values import digest_of, structure_of
from tests.mcp_adapter.servers import shapes_server
from tests.mcp_adapter.servers.shapes_server import PARTS, Row

ROWS = [{"id": "p1", "name": "bolt"}, {"id": "p2", "name": "hex nut"}]


@pytest.mark.parametrize("shape", shapes_server.SHAPES)
async def test_the_same_tools_make_scenarios_in_every_notation(
    shape: Callable[[list[Row]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "APART_SECONDS", 0.01)
    scenarios = await generate_scenarios(Target.parse(shapes_server.make(shape)), count=24)
    assert len(scenarios.scenarios) >= 12
    assert {call.arguments["part_id"] for each in scenarios.scenarios for call in each.calls if call.tool == "get_part"}
    assert any(each.answer for each in scenarios.scenarios)
    assert scenarios.eval


async def test_a_result_that_is_cut_is_harvested_up_to_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "APART_SECONDS", 0.01)
    many = [{**PARTS[0], "part_id": f"zk-{number:04}", "stock": number} for number in range(400)]
    assert len(json.dumps(many)) > 20_000 == Limits().result_chars
    server = InProcessServer("store", shapes_server.make(lambda rows: [json.dumps(rows)], many))
    scenarios = await generate_scenarios(Target((server,)), count=12)
    assert len(scenarios.scenarios) == 12
    assert {call.tool for each in scenarios.scenarios for call in each.calls} >= {"get_part", "parts_in_stock"}


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (repr(ROWS), ROWS),
        ("{'id': 'p1', 'name': 'bolt'}\n{'id': 'p2', 'name': 'hex nut'}", ROWS),
        ("Found 2: [Part(id='p1', name='bolt'), Part(id='p2', name='hex nut')]", ROWS),
        ("[('p1', Decimal('2.5'), None)]", [["p1", "2.5", None]]),
        ("Here:\n\n| id | name |\n|---|:--:|\n| `p1` | **bolt** |\n| p2 | hex nut |\n", ROWS),
        (" id | name\n----+---------\n p1 | bolt\n p2 | hex nut\n(2 rows)", ROWS),
        ("+----+---------+\n| id | name    |\n+----+---------+\n| p1 | bolt    |\n| p2 | hex nut |\n+----+---------+", ROWS),
        ('{"id": "p1", "name": "bolt"}\n{"id": "p2",\n "name": "hex nut"}', ROWS),
        ("Parts:\n```\n" + json.dumps(ROWS) + "\n```", ROWS),
    ],
)  # fmt: skip
def test_a_notation_is_read(text: str, rows: object) -> None:
    assert structure_of(text) == rows


@pytest.mark.parametrize(
    "text",
    [
        "",
        "84",
        "It is mild in Oslo, with some rain.\nTomorrow it will be colder, with snow.",
        "def double(x):\n    return 2 * x",
        "# Guide\n\nStart here.\n\n- one\n- two",
        "Note: it rains.",
        '<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>',
        "print('x')",
        "[" * 5_000,
    ],
)
def test_other_text_has_no_structure(text: str) -> None:
    assert structure_of(text) is None


def test_a_comma_list_is_told_from_a_sentence() -> None:
    assert comma_list("bolt, hex nut and washer.") == ["bolt", "hex nut", "washer"]
    assert comma_list("It rains in Oslo, and it snows in Tromso.") == []
    assert comma_list("1,250") == []


def test_results_with_the_same_values_have_the_same_digest() -> None:
    same = [
        json.dumps(ROWS),
        repr(ROWS[::-1]),
        "|name|id|\n|---|---|\n|bolt|p1|\n|hex nut|p2|",
        json.dumps({"rows": ROWS}),
    ]
    assert len({digest_of(text) for text in same}) == 1
    assert digest_of("84") == digest_of(" 84.0") != digest_of("85")
    assert digest_of(json.dumps(ROWS[:1])) != digest_of(same[0])
