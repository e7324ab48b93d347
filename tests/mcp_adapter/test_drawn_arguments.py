"""Arguments drawn from schemas: every one is accepted by its schema, and every kind of schema has some."""

from __future__ import annotations

import random
import time

import jsonschema
import pytest
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

from offbook_mcp import ServerPool, Target
from offbook_mcp.scenarios.explore import explore
from offbook_mcp.scenarios.harvest import Leaf, singular, words_of
from offbook_mcp.scenarios.sampler import ArgumentSampler
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
        {"type": "string", "minLength": 20},
        {"type": "string", "maxLength": 2},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"type": "integer", "exclusiveMinimum": 5, "maximum": 7},
        {"type": "integer", "maximum": -3},
        {"type": "number", "minimum": 0.5, "multipleOf": 0.25},
        {"type": "integer", "minimum": 1000, "multipleOf": 7},
        {"type": "string", "format": "date"},
        {"type": "object", "properties": {"code": {"type": "string", "pattern": "^K[0-9]$"}}, "required": ["code"]},
        {"oneOf": [{"type": "integer", "minimum": 50}, {"type": "string", "enum": ["xxx"]}]},
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


def test_a_schema_that_cannot_be_applied_accepts_everything() -> None:
    assert drawn(with_property({"type": "string", "pattern": r"^\p{L}+$"}), times=3)
    assert drawn({"properties": {"a": {"$ref": "https://example.com/schema.json"}}, "required": ["a"]}, times=3)


def test_a_pattern_that_takes_ages_is_searched_once_and_then_accepts_everything() -> None:
    accepts, began = checker({"properties": {"a": {"pattern": "^(a|aa)+$"}}}), time.process_time()
    assert all(accepts({"a": "a" * 60 + "!"}) for _ in range(30))
    assert time.process_time() - began < 10


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
