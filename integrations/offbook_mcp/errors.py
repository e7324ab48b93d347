"""Errors of MCP servers and their connections.

McpServerError               base class; `server` is the server's name. A rollout that ends with one is unscored
├── McpStartError            the server never became ready: not found, exited, rejected the connection, or too slow
├── McpConnectionError       the connection ended: the process exited, or HTTP failed
├── McpTimeoutError          a call got no response before its deadline
├── McpOverflowError         the server sent more than `Limits.message_bytes` without a response
├── McpProtocolError         the server sent something that is not a valid MCP message or response
└── McpToolsChangedError     a tool in use was removed or redefined

An error that a tool reports is not an exception: it is a `ToolResult` with `is_error`, which the model reads.
"""

from __future__ import annotations

from offbook import OffbookError


class McpServerError(OffbookError, RuntimeError):
    """Base class of the errors of one MCP server; `server` is its name."""

    def __init__(self, server: str, message: str) -> None:
        super().__init__(f"MCP server {server!r}: {message}")
        self.server = server


class McpStartError(McpServerError):
    """The server never became ready."""


class McpConnectionError(McpServerError, ConnectionError):
    """The connection ended."""


class McpTimeoutError(McpServerError, TimeoutError):
    """A call got no response before its deadline."""


class McpOverflowError(McpServerError):
    """The server sent more than the limit allows; the rest was not read."""


class McpProtocolError(McpServerError):
    """The server sent something that is not a valid MCP message or response."""


class McpToolsChangedError(McpServerError):
    """A tool in use was removed or redefined since it was listed."""
