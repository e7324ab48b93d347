"""Every test that docs/promises.md names exists."""

from __future__ import annotations

import ast
import re

from tests.paths import ROOT

PAGE = ROOT / "docs" / "promises.md"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_test_that_a_promise_names_exists() -> None:
    named = NAMED.findall(PAGE.read_text("utf-8"))
    assert len(named) > 30
    missing = [f"{path}::{name}" for path, name in named if name not in functions_of(path)]
    assert missing == []


def test_every_promise_names_a_test() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| (?!promise|-)[^|]", line)]
    assert [row for row in rows if not NAMED.search(row)] == []


def functions_of(path: str) -> set[str]:
    file = ROOT / path
    if not file.exists():
        return set()
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
