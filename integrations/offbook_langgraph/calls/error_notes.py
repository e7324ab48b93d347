"""Adds notes to the exceptions of an app that say what to change: of a tool, and of a graph without its context."""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any, cast

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


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def add_context_note(error: BaseException, schema: type[Any] | None) -> None:
    """Add a note when the expression that raised reads the context. Does nothing for any other None of the app's."""
    if schema is None or "NoneType" not in str(error):
        return
    frame = traceback.extract_tb(error.__traceback__)[-1]
    source = "".join(linecache.getlines(frame.filename))
    failed = _expression(source, frame)
    if failed is not None and _is_context(failed, source, frame.lineno or 0):
        error.add_note(
            f"The graph has the context_schema {schema.__name__}, but there is no context: pass context=, a value or "
            "(scenario) -> value"
        )


def _expression(source: str, frame: traceback.FrameSummary) -> ast.expr | None:
    """The expression whose attribute or item was read at the frame's position; None for another kind of expression."""
    place = (frame.lineno, frame.colno, frame.end_lineno, frame.end_colno)
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Compare) and _place(node) == place:
            return node.comparators[-1] if isinstance(node, ast.Compare) else node.value
    return None


def _place(node: ast.expr) -> tuple[int, int, int | None, int | None]:
    return node.lineno, node.col_offset, node.end_lineno, node.end_col_offset


def _is_context(expression: ast.expr, source: str, line: int) -> bool:
    """Whether the expression is `runtime.context`, or a name that its function assigned from that."""
    if not isinstance(expression, ast.Name):
        return isinstance(expression, ast.Attribute) and expression.attr == "context"
    around = [
        node
        for node in ast.walk(_parsed(source))
        if isinstance(node, _FUNCTIONS) and node.lineno <= line <= (node.end_lineno or line)
    ]
    for node in ast.walk(max(around, key=lambda node: node.lineno)) if around else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        named = any(isinstance(target, ast.Name) and target.id == expression.id for target in targets)
        if named and isinstance(value, ast.Attribute) and value.attr == "context":
            return True
    return False


def _parsed(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except SyntaxError:  # a notebook cell with magic commands
        return ast.Module([], [])
