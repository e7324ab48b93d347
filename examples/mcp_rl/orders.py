"""An MCP server of one's own: the orders of a shop, in this process."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations

READS = ToolAnnotations(read_only_hint=True)
ITEMS = ("lamp", "desk", "chair", "shelf", "clock", "rug", "vase")
PLACES = ("Oslo", "Lima", "Kyoto", "Turin", "Accra")
STATUSES = ("open", "packed", "sent", "late")
ORDERS = {
    str(4_000 + 37 * number): {
        "item": ITEMS[number % len(ITEMS)],
        "city": PLACES[number % len(PLACES)],
        "status": STATUSES[number % len(STATUSES)],
    }
    for number in range(40)
}

server = MCPServer("orders", version="1", log_level="WARNING")


@server.tool(annotations=READS)
def list_orders() -> list[str]:
    """The numbers of all orders."""
    return list(ORDERS)


@server.tool(annotations=READS)
def order_status(order: str) -> str:
    """The status of an order."""
    return looked_up(order, "status")


@server.tool(annotations=READS)
def order_item(order: str) -> str:
    """The item of an order."""
    return looked_up(order, "item")


@server.tool(annotations=READS)
def order_city(order: str) -> str:
    """The city that an order goes to."""
    return looked_up(order, "city")


def looked_up(order: str, field: str) -> str:
    """A field of an order. Raises ToolError, whose text the model reads."""
    if order not in ORDERS:
        raise ToolError(f"there is no order {order}")
    return ORDERS[order][field]
