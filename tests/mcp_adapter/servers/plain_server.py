"""A server as people write their first one: four plain tools, no annotations, in this process."""

from __future__ import annotations

from mcp.server.mcpserver import MCPServer

server = MCPServer("staff")
DESKS = {
    "Ada": ("lab", 12), "Bo": ("sales", 4), "Cleo": ("lab", 7), "Dan": ("legal", 31), "Eve": ("sales", 18),
    "Finn": ("legal", 2), "Gus": ("lab", 25), "Hal": ("sales", 9), "Ida": ("lab", 40), "Jo": ("legal", 16),
    "Kim": ("sales", 22), "Leo": ("lab", 35),
}  # fmt: skip


@server.tool()
def people() -> list[str]:
    """Everybody who works here."""
    return list(DESKS)


@server.tool()
def department(person: str) -> dict[str, str]:
    """Somebody's department."""
    return {"person": person, "department": DESKS[person][0]}


@server.tool()
def desk(person: str) -> dict[str, object]:
    """Somebody's desk."""
    return {"person": person, "desk": DESKS[person][1]}


@server.tool()
def headcount(department: str) -> dict[str, object]:
    """People by department."""
    return {"department": department, "headcount": sum(desk[0] == department for desk in DESKS.values())}
