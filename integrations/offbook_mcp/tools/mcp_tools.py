"""`mcp_tools`: a target's tools for LangChain and LangGraph. LangChain is imported at the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import Unpack

from offbook.base.errors import MissingExtraError
from offbook_mcp.connection.target import ConnectOptions, TargetLike

if TYPE_CHECKING:
    from .langchain_tools import McpTools


async def mcp_tools(target: TargetLike, *, max_rollouts: int = 16, **options: Unpack[ConnectOptions]) -> McpTools:
    """Return the target's tools as LangChain tools, for sync and async code in any event loop.

    `options` are those of `Target.parse`. Inside `trainable` every rollout has its own sessions where `ServerPool` does not
    share them; at most `max_rollouts` have them at a time. Calls outside rollouts share one further set. The list has
    `close()` and `aclose()`, and is a context manager.
    Raises McpStartError, ConfigError.
    """
    try:
        from .langchain_tools import open_tools
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("offbook"):
            raise
        raise MissingExtraError(error.name, "langgraph") from error
    return await open_tools(target, max_rollouts=max_rollouts, **options)
