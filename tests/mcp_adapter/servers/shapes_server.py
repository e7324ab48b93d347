"""A store of parts whose tools answer in one of the notations that servers use besides JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeAlias

from mcp.server.mcpserver import MCPServer
from mcp.types import CallToolResult, TextContent, ToolAnnotations

READS = ToolAnnotations(read_only_hint=True)
Row: TypeAlias = dict[str, object]
PARTS: list[Row] = [
    {"part_id": f"zk-{number:02}", "name": f"{colour} {thing}", "shelf": shelf, "stock": 7 * number + 3}
    for number, (colour, thing, shelf) in enumerate(
        [
            ("red", "bolt", "north"),
            ("blue", "bolt", "south"),
            ("grey", "nut", "north"),
            ("brass", "nut", "east"),
            ("steel", "washer", "east"),
            ("copper", "pin", "west"),
            ("black", "hinge", "south"),
            ("white", "hook", "west"),
        ]
    )
]


def python_repr(rows: list[Row]) -> list[str]:
    return [repr(rows)]


def markdown_table(rows: list[Row]) -> list[str]:
    lines = [" | ".join(map(str, cells)) for cells in ([*PARTS[0]], ["---"] * 4, *(row.values() for row in rows))]
    return ["\n".join(f"| {line} |" for line in lines)]


def comma_lists(rows: list[Row]) -> list[str]:
    return [", ".join(str(row["part_id"]) for row in rows) if len(rows) > 1 else ", ".join(map(str, rows[0].values()))]


def json_blocks(rows: list[Row]) -> list[str]:
    return [json.dumps(row, indent=2) for row in rows]


def json_lines(rows: list[Row]) -> list[str]:
    return ["\n".join(map(json.dumps, rows))]


def fenced_json(rows: list[Row]) -> list[str]:
    return [f"Found {len(rows)} parts:\n\n```json\n{json.dumps(rows, indent=2)}\n```\n"]


def key_value(rows: list[Row]) -> list[str]:
    return ["\n\n".join("\n".join(f"{name}: {value}" for name, value in row.items()) for row in rows)]


SHAPES = [python_repr, markdown_table, comma_lists, json_blocks, json_lines, fenced_json, key_value]


def make(shape: Callable[[list[Row]], list[str]], parts: list[Row] = PARTS) -> MCPServer:
    """The store, with the results of `shape(rows)` as text blocks. What it does not know is an error."""
    server = MCPServer("store")

    def answer(rows: list[Row]) -> CallToolResult:
        if not rows:
            return CallToolResult(content=[TextContent(type="text", text="there is none")], is_error=True)
        return CallToolResult(content=[TextContent(type="text", text=text) for text in shape(rows)])

    @server.tool(annotations=READS)
    def list_parts() -> CallToolResult:
        """List the parts."""
        return answer(parts)

    @server.tool(annotations=READS)
    def get_part(part_id: str) -> CallToolResult:
        """Get one part."""
        return answer([row for row in parts if row["part_id"] == part_id])

    @server.tool(annotations=READS)
    def parts_in_stock(stock: int) -> CallToolResult:
        """Find the parts with this stock."""
        return answer([row for row in parts if row["stock"] == stock])

    return server
