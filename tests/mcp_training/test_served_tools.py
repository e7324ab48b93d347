"""What a model may call in `chat` and `serve`."""

from __future__ import annotations

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

from offbook import TrainableModel
from offbook.base.errors import ConfigError
from offbook_mcp import ServerPool, Target
from offbook_mcp.commands.serve import served_tools

MODEL = TrainableModel("office", base_model="tiny")


def server(*names: str) -> MCPServer:
    made = MCPServer("office")
    for name in names:
        reads = ToolAnnotations(read_only_hint=True) if name.startswith(("list_", "get_")) else None
        made.add_tool(lambda: "done", name=name, description="A tool.", annotations=reads)
    return made


async def test_tools_that_may_write_need_leave() -> None:
    said: list[str] = []
    async with ServerPool(Target.parse(server("list_rooms", "cancel_booking", "frobnicate"))) as pool:
        assert [tool.name for tool in served_tools(pool.toolset, MODEL, said.append).tools] == ["list_rooms"]
    assert said == [
        "not used: cancel_booking: it may write; --allow TOOL calls it",
        "not used: frobnicate: nothing says that it only reads; --allow TOOL calls it",
    ]
    async with ServerPool(Target.parse(server("cancel_booking"), allow=("cancel_booking",))) as pool:
        assert len(served_tools(pool.toolset, MODEL, said.append).tools) == 1
    async with ServerPool(Target.parse(server("cancel_booking"))) as pool:
        with pytest.raises(ConfigError, match="no tools: none may be called"):
            served_tools(pool.toolset, MODEL, said.append)


async def test_more_tools_than_the_base_reads_are_refused_at_the_start() -> None:
    async with ServerPool(Target.parse(server(*(f"get_{number}" for number in range(40))))) as pool:
        with pytest.raises(ConfigError, match=r"tiny-mcp reads at most 16 tools, the target offers 40: .* --only TOOL"):
            served_tools(pool.toolset, TrainableModel("m", base_model="tiny-mcp"), print)
        assert len(served_tools(pool.toolset, TrainableModel("m", base_model="Qwen/Qwen3-4B"), print).tools) == 40
