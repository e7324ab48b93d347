"""`mcp_tools`: a target's tools for LangChain and LangGraph, loaded only where LangChain is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import Unpack

from understudy.integration import MissingExtraError

from ..connection.target import ConnectOptions, TargetLike

if TYPE_CHECKING:
    from .langchain_tools import McpTools


async def mcp_tools(target: TargetLike, *, max_rollouts: int = 16, **options: Unpack[ConnectOptions]) -> McpTools:
    """The target's tools as LangChain tools, for any event loop, async and sync. `options` are those of `Target.parse`.

    Inside `trainable` each rollout has servers of its own, as `ServerPool` gives them, until it ends; outside of a rollout
    all calls share one. The list has `close()` and `aclose()`, and is a context manager. Raises McpStartError, ConfigError.
    """
    try:
        from .langchain_tools import open_tools
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("understudy"):
            raise
        raise MissingExtraError(error.name, "langgraph") from error
    return await open_tools(target, max_rollouts=max_rollouts, **options)
