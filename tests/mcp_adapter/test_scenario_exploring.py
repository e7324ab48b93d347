"""Exploring: what is read of a server, which values its schemas suggest, and what is left out."""

from __future__ import annotations

import asyncio
from typing import Annotated

import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel, Field

from offbook_mcp import ServerPool, Target
from offbook_mcp.connection.servers import InProcessServer, Limits
from offbook_mcp.scenarios.explore import explore
from offbook_mcp.tools.tool import reads_secrets
from tests.mcp_adapter.conftest import misbehaving

READS = ToolAnnotations(read_only_hint=True)


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
async def test_a_tool_slower_than_the_deadline_of_exploring_is_left_out_and_a_longer_one_lets_it_in() -> None:
    server = MCPServer("slow")

    @server.tool(annotations=READS)
    async def weather(town: str) -> str:
        await asyncio.sleep(0.3)
        return f"rain in {town}"

    async def explored(seconds: float) -> dict[str, str]:
        limits = Limits(explore_seconds=seconds)
        async with ServerPool(Target((InProcessServer("slow", server),), limits=limits)) as pool:
            return (await explore(pool)).left_out

    assert await explored(0.05) == {"weather": "no answer within 0.05 s; --call-timeout waits longer"}
    assert await explored(30) == {}


async def test_a_tool_that_blocks_its_server_is_left_out_and_the_next_is_not_blamed() -> None:
    async with ServerPool(misbehaving("stuck", limits=Limits(explore_seconds=2))) as pool:
        exploration = await explore(pool)
    assert exploration.left_out == {"goad": "no answer within 2 s; --call-timeout waits longer"}
    assert any(call.worked for call in exploration.of("echo"))


class Parcel(BaseModel):
    code: Annotated[str, Field(examples=["zk-41"])]


class Depot(BaseModel):
    parcel: Parcel | None


def examples_server(folder: object = None) -> MCPServer:
    """A server whose tools accept only what their schemas give as examples or defaults."""
    server = MCPServer("examples")

    def check(value: object, known: object) -> str:
        if value != known:
            raise ToolError("no such thing")
        return f"{value} is here"

    @server.tool(annotations=READS)
    def text(bell: Annotated[str, Field(examples=["zq-bell"])]) -> str:
        return check(bell, "zq-bell")

    @server.tool(annotations=READS)
    def item(tags: list[Annotated[str, Field(examples=["zt-tag"])]]) -> str:
        return check(tags, ["zt-tag"])

    @server.tool(annotations=READS)
    def items(tags: Annotated[list[str], Field(examples=[["zu-tag"]])]) -> str:
        return check(tags, ["zu-tag"])

    @server.tool(annotations=READS)
    def nested(depot: Depot) -> str:
        return check(depot.parcel and depot.parcel.code, "zk-41")

    @server.tool(annotations=READS)
    def nested_list(parcels: list[Parcel]) -> str:
        return check([parcel.code for parcel in parcels], ["zk-41"])

    @server.tool(annotations=READS)
    def number(depth: Annotated[int, Field(examples=[True, 4711])]) -> str:
        return check(depth, 4711)

    @server.tool(annotations=READS)
    def share(weight: Annotated[float, Field(examples=[0.125])]) -> str:
        return check(weight, 0.125)

    @server.tool(annotations=READS)
    def default(port: int = 8125) -> str:
        return check(port, 8125)

    return server


async def test_examples_and_defaults_are_tried_at_every_depth_and_of_every_type() -> None:
    async with ServerPool(Target.parse(examples_server)) as pool:
        exploration = await explore(pool)
    worked = {call.tool: dict(call.arguments) for call in exploration.observations if call.worked and call.arguments}
    assert worked == {
        "text": {"bell": "zq-bell"},
        "item": {"tags": ["zt-tag"]},
        "items": {"tags": ["zu-tag"]},
        "nested": {"depot": {"parcel": {"code": "zk-41"}}},
        "nested_list": {"parcels": [{"code": "zk-41"}]},
        "number": {"depth": 4711},
        "share": {"weight": 0.125},
        "default": {"port": 8125},
    }


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("get-env", True),
        ("readPassword", True),
        ("show_api_key", True),
        ("list_tokens", True),
        ("get_event", False),
        ("api_status", False),
    ],
)
def test_a_tool_whose_name_speaks_of_secrets_reads_secrets(name: str, secret: bool) -> None:
    assert reads_secrets(name) == secret
