"""Public names of the finished parts have docstrings, and their variables have the field's names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "src" / "offbook"

# A folder stands for every module in it, and * for the modules of one folder. Add parts; never remove one.
FINISHED = [
    "__init__.py",
    "__main__.py",
    "base",
    "commands",
    "contracts.py",
    "engine/inference",
    "engine/learner",
    "engine/token_tree.py",
    "memory_plan",
    "plugins.py",
    "quickstart",
    "rewards",
    "server/*.py",
    "server/models",
    "server/records",
    "server/sampler",
    "server/training",
    "supervised",
    "policies",
    "tiny",
    "trainer",
]

VAGUE = {"asked", "at", "each", "found", "given", "made", "said"}
PUBLIC_FIELDS = {("server_options.py", "given"), ("contracts.py", "at"), ("doctor.py", "found"), ("types.py", "at")}
"""Vague names that users may already use: they stay."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def modules_of(part: str) -> list[Path]:
    if "*" in part:
        return sorted(PACKAGE.glob(part))
    path = ROOT / part if part == "policies" else PACKAGE / part
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, Definition]]:
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_") and not is_variant(node):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}{node.name}.")


def is_variant(node: Definition) -> bool:
    """An overload or a setter: the docstring is at the function or property that it belongs to."""
    names = [part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in node.decorator_list]
    return bool({"overload", "setter"} & set(names))


def undocumented(source: str) -> list[str]:
    return [name for name, node in public_definitions(ast.parse(source).body) if not ast.get_docstring(node)]


def vague_names(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
    return names & VAGUE


@pytest.mark.parametrize("part", FINISHED)
def test_every_public_function_method_and_class_of_a_finished_part_has_a_docstring(part: str) -> None:
    modules = modules_of(part)
    assert modules != []
    missing = {path.name: undocumented(path.read_text("utf-8")) for path in modules}
    assert {name: names for name, names in missing.items() if names} == {}


@pytest.mark.parametrize("part", FINISHED)
def test_no_variable_of_a_finished_part_has_a_vague_name(part: str) -> None:
    faults = {(path.name, name) for path in modules_of(part) for name in vague_names(path.read_text("utf-8"))}
    assert faults - PUBLIC_FIELDS == set()


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("def run(): pass", ["run"]),
        ("async def run(): pass", ["run"]),
        ("class Job:\n    def run(self): pass", ["Job", "Job.run"]),
        ("class Job:\n    '''A job.'''\n    @property\n    def name(self): return ''", ["Job.name"]),
        ("@overload\ndef run(): ...\ndef run():\n    '''Run.'''", []),
        ("def _run(): pass\nclass _Job:\n    def run(self): pass", []),
    ],
)
def test_a_public_name_without_a_docstring_is_a_fault(source: str, missing: list[str]) -> None:
    assert undocumented(source) == missing


def test_a_vague_name_is_seen_where_it_is_assigned_passed_or_defined() -> None:
    assert vague_names("found = 1\ndef given(made): return [each for each in made]") == {
        "each",
        "found",
        "given",
        "made",
    }
