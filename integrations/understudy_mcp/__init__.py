"""MCP servers as training grounds: connect to one, learn its tools, give each rollout a server of its own."""

from understudy.integration import MissingExtraError

try:
    from .errors import (
        McpConnectionError,
        McpOverflowError,
        McpProtocolError,
        McpServerError,
        McpStartError,
        McpTimeoutError,
        McpToolsChangedError,
    )
    from .limits import Limits
    from .mcp_tools import mcp_tools
    from .oauth import client_credentials
    from .pool import ServerPool
    from .results import ToolResult
    from .rollout_tools import RolloutTools
    from .servers import HttpServer, InProcessServer, StdioServer
    from .target import Target
    from .tools import ServerDescription, ServerTool, ToolKind
    from .toolset import ModelTool, Toolset
    from .training.mcp_trainer import MCPTrainer
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("understudy"):
        raise
    raise MissingExtraError(error.name, "mcp") from error

__all__ = [
    "HttpServer",
    "InProcessServer",
    "Limits",
    "MCPTrainer",
    "McpConnectionError",
    "McpOverflowError",
    "McpProtocolError",
    "McpServerError",
    "McpStartError",
    "McpTimeoutError",
    "McpToolsChangedError",
    "ModelTool",
    "RolloutTools",
    "ServerDescription",
    "ServerPool",
    "ServerTool",
    "StdioServer",
    "Target",
    "ToolKind",
    "ToolResult",
    "Toolset",
    "client_credentials",
    "mcp_tools",
]
