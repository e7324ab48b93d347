"""A server of one's own whose tools are in words that the tiny policy knows, and scenarios for it."""

from __future__ import annotations

from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

from offbook_mcp.scenarios.scenario import CheckKind, McpScenario, ReferenceCall, ScenarioSet

READS = ToolAnnotations(read_only_hint=True)


def make_server() -> MCPServer:
    """Orders: their status, and their owner."""
    server = MCPServer("orders")

    @server.tool(annotations=READS)
    def order_status(order: str) -> str:
        """The status of an order."""
        return f"order {order} is {status_of(order)}"

    @server.tool(annotations=READS)
    def order_owner(order: str) -> str:
        """Who has ordered it."""
        return f"order {order} is of Ada"

    return server


def write_module(folder: Path) -> None:
    """Write orders.py, a module of the user's with the server as `server`."""
    (folder / "orders.py").write_text(Path(__file__).read_text("utf-8") + "\nserver = make_server()\n", "utf-8")


def status_of(order: str) -> str:
    return ("open", "sent", "late")[int(order) % 3]


def scenarios(count: int = 12) -> ScenarioSet:
    """Half with the tool's name in the task, half without; a quarter is held out."""
    made: list[McpScenario] = []
    for number in range(count):
        order = str(4_000 + 37 * number)
        open_choice = number % 2 == 1
        made.append(
            McpScenario(
                id=f"order-{order}",
                task=f"where is order {order}?" if open_choice else f"order status of order {order}",
                difficulty=2 if open_choice else 1,
                tools=("order_status",),
                check=CheckKind.ANSWER,
                calls=(ReferenceCall(tool="order_status", arguments={"order": order}),),
                answer=(status_of(order),),
                split="eval" if number % 4 == 3 else "train",
            )
        )
    return ScenarioSet(tuple(made), "")
