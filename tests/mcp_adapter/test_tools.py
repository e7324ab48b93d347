"""A server's tools as the model's: schemas, names, bound arguments, distractors, results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment
from mcp import types
from pydantic import BaseModel

from offbook.base.errors import ConfigError
from offbook.base.text import one_line, printable
from offbook_mcp import ServerDescription, ServerPool, ServerTool, Target
from offbook_mcp.tools.rollout_tools import as_tool_result
from offbook_mcp.tools.schemas import simplified
from offbook_mcp.tools.tool import fingerprint
from offbook_mcp.tools.toolset import make_toolset
from tests.mcp_adapter.conftest import misbehaving
from tests.mcp_adapter.servers import notes_server
from tests.paths import ROOT

TEXT: dict[str, object] = {"type": "string"}


def described(*tools: ServerTool, **more: Any) -> ServerDescription:
    facts: dict[str, Any] = {
        "title": "shop",
        "version": "1",
        "protocol": "2025-11-25",
    }
    return ServerDescription(name="shop", tools=tools, **{**facts, **more})


def tool(name: str, **properties: object) -> ServerTool:
    return ServerTool("shop", name, f"About {name}.", {"type": "object", "properties": properties})


@pytest.mark.parametrize(
    ("schema", "simple"),
    [
        (  # pydantic's optional argument
            {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Since"},
            {"type": "string"},
        ),
        ({"type": ["integer", "null"]}, {"type": "integer"}),
        ({"type": ["integer", "string"]}, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        ({"$ref": "#/$defs/City", "description": "where"}, {"enum": ["Delft"], "type": "string", "description": "where"}),
        ({"const": "fixed"}, {"enum": ["fixed"]}),
        ({"oneOf": [{"type": "string"}, {"type": "number"}]}, {"anyOf": [{"type": "string"}, {"type": "number"}]}),
        (
            {"allOf": [{"$ref": "#/$defs/City"}, {"minLength": 2}]},
            {"enum": ["Delft"], "type": "string", "minLength": 2},
        ),
        (
            {"type": "array", "items": {"$ref": "#/$defs/Node"}},
            {"type": "array", "items": {"type": "object", "properties": {"next": {}}}},
        ),
        ({"$ref": "https://x.example/s"}, {}),
        ({"type": "string", "contentEncoding": "base64"}, TEXT),
        ({"type": "object", "additionalProperties": {"$ref": "#/$defs/City"}},
         {"type": "object", "additionalProperties": {"enum": ["Delft"], "type": "string"}}),
        (True, {}),
        ("text", {}),
    ],
)  # fmt: skip
def test_a_schema_is_kept_or_simplified(schema: Any, simple: Any) -> None:
    definitions = {
        "City": {"enum": ["Delft"], "type": "string", "title": "City"},
        "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}},
    }
    whole = {"type": "object", "properties": {"a": schema}, "$defs": definitions, "$schema": "x"}
    result = simplified(whole)
    assert result == {"type": "object", "properties": {"a": simple}}


def test_a_schema_that_explodes_is_cut() -> None:
    definitions = {
        f"D{n}": {"type": "object", "properties": {f"p{k}": {"$ref": f"#/$defs/D{n + 1}"} for k in range(10)}}
        for n in range(9)
    }
    result = simplified({"type": "object", "properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": definitions})
    assert len(json.dumps(result)) < 200_000
    deep: dict[str, object] = {}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    assert len(json.dumps(simplified({"type": "object", "properties": {"a": deep}}))) < 1_000


class _Tree(BaseModel):
    value: int
    left: _Tree | None = None
    right: _Tree | None = None


def test_an_optional_reference_to_the_schema_around_it_is_recursive() -> None:
    definitions = _Tree.model_json_schema()["$defs"]
    by_all_of = {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "left": {"allOf": [{"$ref": "#/$defs/B"}]}},
    }
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/_Tree"}, "b": {"allOf": [{"$ref": "#/$defs/B"}]}},
        "$defs": {**definitions, "B": by_all_of},
    }
    result = simplified(schema)
    value = {"type": "integer"}
    assert result["properties"] == {
        "a": {"type": "object", "properties": {"value": value, "left": {}, "right": {}}, "required": ["value"]},
        "b": {"type": "object", "properties": {"value": value, "left": {}}},
    }


def test_an_optional_value_of_several_parts_is_merged() -> None:
    parts = {"allOf": [{"type": "string"}, {"type": "string", "minLength": 2}]}
    both = {"anyOf": [{"$ref": "#/$defs/Both"}, {"type": "null"}]}
    result = simplified({"type": "object", "properties": {"a": both}, "$defs": {"Both": parts}})
    assert result["properties"] == {"a": {"type": "string", "minLength": 2}}


def _nested(levels: int, name: str = "p") -> dict[str, object]:
    """A schema with objects inside objects, or in arrays, or under any key."""
    schema: dict[str, object] = {"type": "string"}
    for level in range(levels):
        schema = (
            {"type": "object", "properties": {name: schema}}
            if level % 2
            else {"type": "object", "additionalProperties": schema}
        )
    return {"type": "object", "properties": {name: schema}}


@pytest.mark.parametrize("inner", [False, True])
def test_the_options_of_an_object_are_offered_together(inner: bool) -> None:
    by_id = {"properties": {"id": {"type": "string"}}, "required": ["id"]}
    by_name = {"$ref": "#/$defs/Named"}
    named = {"properties": {"name": {"type": "string"}}, "required": ["name"]}
    choice: Any = {"type": "object", "properties": {"limit": {"type": "integer"}}, "anyOf": [by_id, by_name]}
    root = {"type": "object", "properties": {"a": choice}} if inner else choice
    result = simplified({**root, "$defs": {"Named": named}})
    simple: Any = result["properties"]["a"] if inner else result  # type: ignore[index]
    assert set(simple["properties"]) == {"id", "name", "limit"}
    assert "anyOf" not in simple and "required" not in simple


@pytest.mark.parametrize("name", ["p", "a.b", ".a"])
def test_a_schema_is_as_deep_as_the_bundled_policys_template_takes(name: str) -> None:
    template = Environment().from_string((ROOT / "src/offbook/tiny/mcp_policy/chat_template.jinja").read_text())
    template.globals["raise_exception"] = _refuse
    for levels in range(12):
        result = simplified(_nested(levels, name))
        function = {"type": "function", "function": {"name": "goad", "parameters": result}}
        assert "goad<1>" in template.render(messages=[], tools=[function])
        if name == "p":
            assert ('"string"' in json.dumps(result)) == (levels < 6), levels


def _refuse(reason: str) -> None:
    raise AssertionError(reason)


@pytest.mark.parametrize("name", ["time", "git", "everything", "filesystem", "memory"])
def test_the_schemas_of_five_real_servers_lose_nothing_but_nulls(name: str) -> None:
    listed = json.loads((ROOT / "tests/mcp_adapter/listed" / f"{name}.json").read_text())["tools"]
    for each in listed:
        result = simplified(each["inputSchema"])
        assert set(result["properties"]) == set(each["inputSchema"].get("properties", {}))  # type: ignore[call-overload]
        assert result.get("required", []) == each["inputSchema"].get("required", [])
        assert '"title":' not in json.dumps(result)


def test_names_are_what_every_provider_takes() -> None:
    toolset = make_toolset([described(tool("files/read.text"), tool("files/read_text"), tool("x" * 80), tool("日"))])
    names = [each.name for each in toolset.tools]
    assert names == ["files_read_text", "files_read_text_2", "x" * 64, "Ri"]
    assert "files_read_text: is files/read.text of shop" in toolset.changes


def test_a_bound_argument_is_hidden_and_filled_in() -> None:
    path = {"type": "string", "description": "the repository"}
    log = ServerTool(
        "git",
        "log",
        "",
        {"type": "object", "properties": {"repo": path, "n": {"type": "integer"}}, "required": ["repo"]},
    )
    toolset = make_toolset(
        [described(log, tool("show", repo=TEXT, rev=TEXT))], bind={"repo": "{rollout_dir}/r", "log.n": "3"}
    )
    assert toolset.functions()[0]["function"]["parameters"] == {"type": "object", "properties": {}}
    assert toolset.tools[0].arguments({"repo": "/etc"}, "/tmp/1") == {"repo": "/tmp/1/r", "n": 3}
    assert toolset.tools[1].arguments({"rev": "HEAD"}, "/tmp/1") == {"rev": "HEAD", "repo": "/tmp/1/r"}
    with pytest.raises(ConfigError, match="bind: no tool has an argument 'branch'; the arguments are n, repo, rev"):
        make_toolset([described(log, tool("show", repo=TEXT, rev=TEXT))], bind={"branch": "main"})


def test_the_model_is_shown_what_is_expected_and_seeded_distractors() -> None:
    toolset = make_toolset([described(*(tool(f"tool_{n}") for n in range(20)))])
    shown = [each.name for each in toolset.shown(["tool_17", "tool_3"], 8, seed=1).tools]
    assert len(shown) == 8 and {"tool_3", "tool_17"} <= set(shown)
    assert shown == sorted(shown, key=lambda name: int(name.split("_")[1]))
    assert shown == [each.name for each in toolset.shown(["tool_3", "tool_17"], 8, seed=1).tools]
    assert shown != [each.name for each in toolset.shown(["tool_3", "tool_17"], 8, seed=2).tools]
    assert toolset.shown(["tool_3"], None, seed=1) is toolset
    with pytest.raises(ConfigError, match="max_tools: 2 tools are expected, 1 may be shown"):
        toolset.shown(["tool_3", "tool_17"], 1, seed=1)
    with pytest.raises(ConfigError, match="expected: there is no tool 'tool_99'"):
        toolset.shown(["tool_99"], 8, seed=1)


def test_a_tool_that_only_runs_as_a_task_is_left_out_and_a_server_without_tools_refused() -> None:
    task = ServerTool("shop", "research", "", {}, needs_task=True)
    assert make_toolset([described(task, tool("a"))]).left_out == {"research": "it can only run as a task"}
    with pytest.raises(ConfigError, match="no tools: shop offers none that can be called"):
        make_toolset([described(task)])


def result(*content: Any, **more: Any) -> types.CallToolResult:
    return types.CallToolResult(content=list(content), **more)


def text(value: str) -> types.TextContent:
    return types.TextContent(type="text", text=value)


BLOB = types.BlobResourceContents(uri="a://b", blob="AAAA", mime_type="application/pdf")
IMAGE = types.ImageContent(type="image", data="A" * 1_000, mime_type="image/png")


@pytest.mark.parametrize(
    ("answer", "read", "is_error"),
    [
        (result(text("a"), text("b")), "a\nb", False),
        (result(text("{...}"), structured_content={"zone": "UTC", "é": 1}), '{"zone": "UTC", "é": 1}', False),
        (result(text("a"), structured_content={"result": "plain"}), "plain", False),
        (result(text("a"), structured_content={"result": [1, 2]}), "[1, 2]", False),
        (result(text("it failed"), structured_content={"a": 1}, is_error=True), "it failed", True),
        (
            result(text("here:"), IMAGE),
            "here:\n[image not shown (image/png, 750 bytes): this model reads text only]",
            False,
        ),
        (result(IMAGE), "[image not shown (image/png, 750 bytes): this model reads text only]", True),
        (
            result(types.EmbeddedResource(resource=BLOB)),
            "[binary resource not shown (application/pdf, 3 bytes): this model reads text only]",
            True,
        ),
        (result(), "", False),
        (result(types.ResourceLink(type="resource_link", name="n", uri="demo://1")), "n: demo://1", False),
        (result(text("a\ud800b")), "a?b", False),
    ],
)
def test_an_answer_is_read_as_text(answer: types.CallToolResult, read: str, is_error: bool) -> None:
    converted = as_tool_result(answer, 1_000)
    assert (converted.text, converted.is_error) == (read, is_error)


def test_a_long_answer_is_cut_with_a_note() -> None:
    converted = as_tool_result(result(text("x" * 5_000)), 100)
    assert converted.text == "x" * 100 + "\n[cut here: these are the first 100 of 5,000 characters]"
    assert converted.cut


def test_a_servers_text_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\u202ec\u200b\x9b31m\td\n👩‍🚀") == r"a\x1b[2Jb\x07\u202ec\u200b\x9b31m" + "\td\n👩‍🚀"
    assert one_line("a\n\n b\x00" + "c" * 300, 10) == r"a b\x00..."


def test_the_fingerprint_covers_names_schemas_and_the_server_and_not_the_folder() -> None:
    one = described(ServerTool("shop", "a", "in /tmp/1", {"type": "object"}))
    other = described(ServerTool("shop", "a", "in /tmp/2", {"type": "object"}))
    assert fingerprint([one], "/tmp/1") == fingerprint([other], "/tmp/2") != fingerprint([other])
    changed = described(ServerTool("shop", "a", "in /tmp/1", {"type": "object", "required": ["x"]}))
    assert len({fingerprint([each], "/tmp/1") for each in (one, changed, described(one.tools[0], version="2"))}) == 3


async def test_what_the_model_does_wrong_is_an_answer_it_can_read() -> None:
    async with ServerPool(misbehaving("well")) as pool, pool.rollout() as tools:
        assert (await tools.call("shout", {})).text == "there is no tool 'shout'; there are echo, goad"
        assert (await tools.call("echo", '{"text": ')).text.startswith("the arguments of echo are not valid JSON: ")
        assert (await tools.call("echo", "[1]")).text == "the arguments of echo must be an object, not list"
        assert (await tools.call("echo", '{"text": "a"}')).text == "a"
        for wrong in ({}, "[1]", '{"text'):
            assert (await tools.call("shout" if wrong == {} else "echo", wrong)).is_error


async def test_an_answer_that_breaks_its_own_output_schema_is_an_error_the_model_reads() -> None:
    server = notes_server.make()

    @server.tool(structured_output=False)
    def sloppy() -> str:
        """Promises a number."""
        return "text"

    server._tool_manager.get_tool("sloppy").fn_metadata.output_schema = {"type": "object", "required": ["n"]}  # type: ignore[union-attr]
    async with ServerPool(Target.parse(server, allow_all=True)) as pool, pool.rollout() as tools:
        answer = await tools.call("sloppy", {})
    assert answer.is_error and "output schema" in answer.text


SLOW_PATTERN = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("slow")

@server.tool()
def slow() -> dict[str, str]:
    return {"n": "a" * 60 + "!"}

schema = {"type": "object", "properties": {"n": {"type": "string", "pattern": "^(a|aa)+$"}}, "required": ["n"]}
server._tool_manager.get_tool("slow").fn_metadata.output_schema = schema
server.run()
"""
"""Its result fails on the pattern in 2 to the power of 40 ways."""


async def test_an_output_schema_with_a_slow_pattern_holds_up_nothing(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SLOW_PATTERN)
    target = Target.parse(f"{sys.executable} {tmp_path / 'server.py'}", allow_all=True)
    async with ServerPool(target) as pool, pool.rollout() as tools:
        answer = await tools.call("slow", {})
    assert not answer.is_error and "aaaa!" in answer.text
