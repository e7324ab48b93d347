"""What goes wrong between us and an MCP server.

McpServerError               base; `server` is its name. A rollout that meets one is recorded and unscored
├── McpStartError            the server never became ready: not found, exited, refused us, or too slow
├── McpConnectionError       the connection is gone: the process exited, or HTTP failed
├── McpTimeoutError          a call got no answer before its deadline
├── McpOverflowError         the server sent more than `Limits.message_bytes` without answering
├── McpProtocolError         the server sent what is no MCP message, or an answer of the wrong shape
└── McpToolsChangedError     a tool that is in use was removed or redefined

What a tool itself reports as an error is no exception: it is a `ToolResult` with `is_error`, and the model reads it.
"""

from __future__ import annotations

from understudy import UnderstudyError


class McpServerError(UnderstudyError, RuntimeError):
    """Base: the fault of one MCP server."""

    def __init__(self, server: str, message: str) -> None:
        super().__init__(f"MCP server {server!r}: {message}")
        self.server = server


class McpStartError(McpServerError):
    """The server never became ready."""


class McpConnectionError(McpServerError, ConnectionError):
    """The connection is gone."""


class McpTimeoutError(McpServerError, TimeoutError):
    """A call got no answer before its deadline."""


class McpOverflowError(McpServerError):
    """The server sent more than the limit allows; the rest was not read."""


class McpProtocolError(McpServerError):
    """The server sent what is no MCP message, or an answer of the wrong shape."""


class McpToolsChangedError(McpServerError):
    """A tool that is in use was removed or redefined since it was listed."""
