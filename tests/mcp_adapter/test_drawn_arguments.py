"""Arguments drawn from schemas: every one is accepted by its schema, and every kind of schema has some."""

from __future__ import annotations

import random
import re
import time

import jsonschema
import pytest
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

from offbook_mcp import ServerPool, Target
from offbook_mcp.scenarios.explore import explore
from offbook_mcp.scenarios.harvest import Leaf, singular, words_of
from offbook_mcp.scenarios.sampler import ArgumentSampler
from offbook_mcp.scenarios.slots import dates_like
from offbook_mcp.tools.schemas import checker
from offbook_mcp.tools.tool import Schema, ServerDescription, ServerTool, ToolKind
from offbook_mcp.tools.toolset import ModelTool, make_toolset

TEXT: Schema = {"type": "string"}


def tool_of(schema: Schema, name: str = "find_part", description: str = "") -> ModelTool:
    tool = ServerTool("s", name, description, schema, kind=ToolKind.READ)
    return make_toolset([ServerDescription("s", None, None, "1", (tool,))]).tools[0]


def with_property(schema: Schema, name: str = "thing") -> Schema:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


def drawn(schema: Schema, *leaves: Leaf, times: int = 60) -> list[dict[str, object]]:
    sampler = ArgumentSampler(random.Random(0))
    sampler.add(leaves)
    drafts = [sampler.draw(tool_of(schema)) for _ in range(times)]
    assert all(drafts)
    return [dict(draft.arguments) for draft in drafts if draft is not None]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": r"^[A-Z]{2}-\d{4}$"},
        {"type": "string", "minLength": 20},
        {"type": "string", "maxLength": 2},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "integer", "exclusiveMinimum": 5, "maximum": 7},
        {"type": "integer", "maximum": -3},
        {"type": "number", "minimum": 0.5, "multipleOf": 0.25},
        {"type": "integer", "minimum": 1000, "multipleOf": 7},
        {"type": "string", "format": "date"},
        {"type": "object", "additionalProperties": {"type": "integer", "minimum": 3}},
        {"type": "array", "items": {"type": "string", "pattern": r"^\d{3}$"}, "minItems": 2},
        {"type": "object", "properties": {"code": {"type": "string", "pattern": "^K[0-9]$"}}, "required": ["code"]},
        {"oneOf": [{"type": "integer", "minimum": 50}, {"type": "string", "pattern": "^x{3}$"}]},
    ],
)
def test_what_is_drawn_is_what_the_schema_accepts(schema: Schema) -> None:
    leaves = [
        Leaf(value, f"list_parts: [].thing{number}", ("thing",)) for number, value in enumerate(["bolt", 2, "K1", 0.5])
    ]
    for arguments in drawn(with_property(schema), *leaves):
        jsonschema.validate(arguments, with_property(schema))


def test_every_option_of_a_union_is_drawn() -> None:
    inner: Schema = {
        "anyOf": [{"type": "integer"}, {"type": "string", "enum": ["a"]}, {"type": "array", "items": TEXT}]
    }
    assert {type(arguments["thing"]) for arguments in drawn(with_property(inner))} == {int, str, list}
    whole: Schema = {
        "type": "object",
        "properties": {"verbose": {"type": "boolean"}},
        "oneOf": [
            {
                "properties": {"kind": {"const": "circle"}, "radius": {"type": "integer"}},
                "required": ["kind", "radius"],
            },
            {"properties": {"kind": {"const": "box"}, "side": {"type": "integer"}}, "required": ["kind", "side"]},
        ],
    }
    made = drawn(whole)
    assert {(arguments["kind"], "radius" in arguments, "side" in arguments) for arguments in made} == {
        ("circle", True, False),
        ("box", False, True),
    }


def test_a_map_has_known_names_as_its_keys() -> None:
    stock = with_property({"type": "object", "additionalProperties": {"type": "integer"}}, "parts")
    made = drawn(stock, Leaf("bolt", "list_parts: [].part", ("part",)))
    assert any("bolt" in str(arguments["parts"]) for arguments in made)


@pytest.mark.parametrize(
    ("examples", "description", "first"),
    [
        (["31/12/2025"], "", ["31/12/2025", "01/01/2026"]),
        (["December 31, 2025"], "", ["December 31, 2025", "January 01, 2026"]),
        ([], "The day, as DD.MM.YYYY", ["03.01.2026", "04.01.2026"]),
        (["20251231"], "YYYYMMDD", ["20251231", "20260101"]),
        (["2025-12"], "", ["2025-12", "2026-01"]),
        (["bolt"], "The part", []),
    ],
)
def test_dates_follow_the_example_or_the_spelled_format(
    examples: list[str], description: str, first: list[str]
) -> None:
    assert dates_like(examples, description)[:2] == first


def test_a_nested_date_is_drawn_in_the_format_of_its_example() -> None:
    day: Schema = {"type": "string", "examples": ["31/12/2025"]}
    made = drawn(with_property({"type": "object", "properties": {"day": day}, "required": ["day"]}))
    days = {arguments["thing"]["day"] for arguments in made}  # type: ignore[index]
    assert len(days) > 5 and all(re.fullmatch(r"\d\d/\d\d/20\d\d", str(day)) for day in days)


def test_a_schema_that_cannot_be_applied_accepts_everything() -> None:
    assert drawn(with_property({"type": "string", "pattern": r"^\p{L}+$"}), times=3)
    assert drawn({"properties": {"a": {"$ref": "https://example.com/schema.json"}}, "required": ["a"]}, times=3)


def test_a_pattern_that_takes_ages_is_searched_once_and_then_accepts_everything() -> None:
    accepts, began = checker({"properties": {"a": {"pattern": "^(a|aa)+$"}}}), time.process_time()
    assert all(accepts({"a": "a" * 60 + "!"}) for _ in range(30))
    assert time.process_time() - began < 10


def test_no_text_is_made_of_a_pattern_whose_nested_repeats_would_make_it_endless() -> None:
    assert drawn(with_property({"type": "string", "pattern": r"^\w*((((((a+)*)*)*)*)*)*$"}), times=3)


async def test_a_tool_whose_schema_accepts_nothing_is_left_out_by_name() -> None:
    server = MCPServer("odd")
    server.add_tool(lambda thing: "", name="find", annotations=ToolAnnotations(read_only_hint=True))
    tool = server._tool_manager.get_tool("find")
    assert tool is not None
    tool.parameters = with_property({"type": "integer", "minimum": 3, "maximum": 2})
    async with ServerPool(Target.parse(server)) as pool:
        found = await explore(pool)
    assert found.left_out == {"find": "no arguments are known that its schema accepts"}


def test_names_in_other_alphabets_are_transliterated_and_read() -> None:
    tools = [ServerTool("s", name, "", {"type": "object"}) for name in ("查询价格", "größe", "查询价格 ", "🎲")]
    described = ServerDescription("s", None, None, "1", tuple(tools))
    assert [tool.name for tool in make_toolset([described]).tools][:2] == ["ChaXunJiaGe", "grosse"]
    assert words_of("größe_der_Kiste") == ("größe", "der", "kiste") and words_of("商品") == ("商品",)


@pytest.mark.parametrize(
    ("plural", "one"),
    [("entities", "entity"), ("people", "person"), ("shelves", "shelf"), ("statuses", "status"), ("analysis", "analysis"),
     ("address", "address"), ("news", "news"), ("children", "child"), ("bus", "bus")],
)  # fmt: skip
def test_the_singular_of_a_word(plural: str, one: str) -> None:
    assert singular(plural) == one
