"""The tables of `docs/frameworks.md`: each version is the one that is installed for the tests, each test exists."""

from __future__ import annotations

import ast
import re
from importlib.metadata import version

import pytest

from tests.client.results import results
from tests.paths import ROOT, script

ROW = re.compile(r"^\| `([\w-]+)` \| ([\d.]+) \| .+ \| `(tests/[\w/]+\.py)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "frameworks.md").read_text("utf-8"))


def pins(name: str) -> dict[str, str]:
    """Package -> version in a file of `requirements/` and in those that it includes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text("utf-8")
    found = {package: pinned for package, pinned in re.findall(r"^([\w.-]+)(?:\[.*\])?==([\w.]+)", text, re.MULTILINE)}
    for included in re.findall(r"^-r (\w+)\.txt", text, re.MULTILINE):
        found = pins(included) | found
    return found


def test_every_row_of_the_tables_is_read() -> None:
    text = (ROOT / "docs" / "frameworks.md").read_text("utf-8")
    assert len(ROWS) == len(re.findall(r"^\| `", text, re.MULTILINE)) == 15


@pytest.mark.parametrize(("package", "pinned", "test"), ROWS)
def test_a_framework_is_installed_in_its_version_and_imported_by_its_tests(
    package: str, pinned: str, test: str
) -> None:
    assert pins("test")[package] == pinned == version(package)
    tree = ast.parse((ROOT / test).read_text("utf-8"))
    assert any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_") for node in tree.body
    )
    modules = {"openai-agents": "agents", "pydantic-ai-slim": "pydantic_ai", "google-genai": "google.genai"}
    assert modules.get(package, package.replace("-", "_")) in (ROOT / test).read_text("utf-8")


def test_the_table_of_clients_is_what_their_tests_saw() -> None:
    made = script(ROOT / "scripts" / "frameworks_table.py")
    assert made.PAGE.read_text("utf-8") == made.page(), "run: python scripts/frameworks_table.py"
    assert len(re.findall("^[|] (Python|Node|command line) [|]", made.page(), re.MULTILINE)) == len(results()) > 30
