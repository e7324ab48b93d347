"""Trains models to use MCP servers: connects to a server, reads its tools, and gives every rollout its own session."""

from importlib.metadata import PackageNotFoundError, version

from offbook.base.errors import MissingExtraError


def _needed(package: str) -> str:
    """What is missing: version 2 of the SDK, if another package keeps version 1 installed."""
    try:
        installed = version("mcp")
    except PackageNotFoundError:
        return package
    if installed.partition(".")[0] != "1":
        return package
    return (
        f"mcp 2 (here is mcp {installed}, as langchain-mcp-adapters needs it: give that package an environment of its own, "
        "or use offbook_mcp.mcp_tools in its place)"
    )


try:
    from .connection.http_transport import client_credentials
    from .connection.pool import ServerPool
    from .connection.servers import HttpServer, InProcessServer, Limits, StdioServer
    from .connection.target import Target
    from .errors import (
        McpConnectionError,
        McpOverflowError,
        McpProtocolError,
        McpServerError,
        McpStartError,
        McpTimeoutError,
        McpToolsChangedError,
    )
    from .scenarios.generate import generate_scenarios
    from .scenarios.scenario import McpScenario, ScenarioSet, load_scenarios, save_scenarios
    from .tools.mcp_tools import mcp_tools
    from .tools.rollout_tools import RolloutTools, ToolResult
    from .tools.tool import ServerDescription, ServerTool, ToolKind
    from .tools.toolset import ModelTool, Toolset
    from .training.mcp_trainer import MCPTrainer
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("offbook"):
        raise
    raise MissingExtraError(_needed(error.name), "mcp") from error

__all__ = [
    "HttpServer",
    "InProcessServer",
    "Limits",
    "MCPTrainer",
    "McpConnectionError",
    "McpOverflowError",
    "McpProtocolError",
    "McpScenario",
    "McpServerError",
    "McpStartError",
    "McpTimeoutError",
    "McpToolsChangedError",
    "ModelTool",
    "RolloutTools",
    "ScenarioSet",
    "ServerDescription",
    "ServerPool",
    "ServerTool",
    "StdioServer",
    "Target",
    "ToolKind",
    "ToolResult",
    "Toolset",
    "client_credentials",
    "generate_scenarios",
    "load_scenarios",
    "mcp_tools",
    "save_scenarios",
]
