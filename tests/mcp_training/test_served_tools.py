"""What a model may call in `chat` and `serve`."""

from __future__ import annotations

from pathlib import Path

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

from offbook import TrainableModel
from offbook.base.errors import ConfigError
from offbook_mcp import ServerPool, Target
from offbook_mcp.commands.serve import served_tools
from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, ReferenceCall, ScenarioSet, save_scenarios
from offbook_mcp.training.scenario_source import scenario_file

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


async def test_tools_that_no_scenario_trained_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path))
    model = TrainableModel("rooms", base_model="tiny")
    call = ReferenceCall(tool="list_rooms", arguments={})
    trained = McpScenario(
        id="s1",
        task="rooms please",
        difficulty=1,
        tools=(call.tool,),
        check=CheckKind.CALLS,
        calls=(call,),
        server="ab12",
    )
    held_out = trained.model_copy(update={"id": "s2", "split": "eval", "tools": ("list_floors",)})
    said: list[str] = []
    async with ServerPool(Target.parse(server("list_rooms", "list_floors", "cancel_booking"), allow_all=True)) as pool:
        served_tools(pool.toolset, model, said.append)
        assert said == [], "without its scenarios nothing is known"
        save_scenarios(ScenarioSet((trained, held_out), "ab12"), scenario_file(model))
        served_tools(pool.toolset, model, said.append)
        scenario_file(model).write_text("no JSON\n")
        assert len(served_tools(pool.toolset, model, said.append).tools) == 3
    assert said.pop().startswith("which tools were trained is unknown: rooms.jsonl, line 1: not JSON")
    assert said == ["not trained: list_floors, cancel_booking: no scenario has such a call, so expect mistakes"]
