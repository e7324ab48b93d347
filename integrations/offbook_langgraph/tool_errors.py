"""Adds a note to the exception of a tool. Such a rollout ends unscored, and the note says how the policy can learn from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import FrameType
from typing import cast

from langchain_core.tools import BaseTool
from langgraph.errors import GraphBubbleUp

from offbook import OffbookError


def add_tool_note(error: BaseException | None) -> None:
    """Add a note to an exception that a LangChain tool raised: the tool, its arguments, and how to turn it into a low reward.

    Does nothing for other exceptions and for this package's own errors.
    """
    if not isinstance(error, Exception) or isinstance(error, OffbookError | GraphBubbleUp):
        return
    inside = [frame.f_locals for frame in _frames(error) if frame.f_globals.get("__name__") == BaseTool.__module__]
    runs = [values for values in inside if "tool_input" in values and isinstance(values.get("self"), BaseTool)]
    if not runs or any("the policy's arguments" in note for note in getattr(error, "__notes__", ())):
        return
    tool, arguments = cast(BaseTool, runs[-1]["self"]), _policys_arguments(runs[-1])
    error.add_note(
        f"The tool {tool.name!r} raised on the policy's arguments {arguments!r:.300}. "
        "This rollout is unscored, so the policy does not learn from it. If the arguments are to blame, show the model the "
        "error: create_agent(..., middleware=[ToolErrorMiddleware(lambda error, request: repr(error))]) or ToolNode(tools, "
        "handle_tool_errors=True). Or give a low reward: wrap a function that runs the graph in `try:` and ends with "
        f"`except {type(error).__name__}: return 0.0`"
    )


def _policys_arguments(run: Mapping[str, object]) -> object:
    """The arguments of a tool's run that the model wrote, without state, store and runtime that LangGraph injected."""
    given = run["tool_input"]
    if not isinstance(given, dict):
        return given
    return run.get("filtered_tool_input", sorted(cast(dict[str, object], given)))


def _frames(error: BaseException) -> Iterator[FrameType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
