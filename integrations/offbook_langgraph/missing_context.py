"""Adds a note to the exception of a graph that reads its run-scoped context when it has none."""

from __future__ import annotations

import ast
import linecache
import traceback
from typing import Any

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
