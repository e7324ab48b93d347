"""The import direction of the design, held as a table."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.paths import ROOT

BASE = {"errors", "types", "config", "wire", "tiny"}
MACHINE = BASE | {"devices"}
USER_BASE = BASE | {"contracts", "plugins"}

# For each part of the package: the other parts it may import.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "tiny": {"config", "errors", "types"},
    "config": {"errors"},
    "types": {"errors"},
    "devices": {"errors"},
    "wire": {"config", "errors", "types"},
    "contracts": {"config", "errors", "types"},
    "plugins": {"config", "contracts", "errors", "types"},
    "client": USER_BASE,
    "rewards": USER_BASE | {"client"},
    "scenarios": USER_BASE | {"client"},
    "tracing": USER_BASE | {"client"},
    "trainer": USER_BASE | {"client", "rewards", "scenarios", "tracing"},
    "quickstart": USER_BASE | {"client", "rewards", "scenarios", "tracing", "trainer", "understudy_langgraph"},
    "compat": USER_BASE | {"client", "rewards"},
    "doctor": USER_BASE | {"client"},
    "cli": USER_BASE | {"client", "rewards", "scenarios", "tracing", "trainer", "quickstart", "compat", "doctor"},
    "__main__": {"cli"},
    "engine.protocol": BASE,
    "engine.checkpoint_files": BASE,
    "engine": MACHINE | {"engine.protocol", "engine.checkpoint_files"},
    "server": MACHINE | {"engine.protocol", "engine.checkpoint_files"},
}
"""The public names (`understudy.__init__`) may name any part: they are loaded lazily."""

HEAVY = {
    "torch",
    "transformers",
    "peft",
    "langgraph",
    "langchain",
    "langchain_core",
    "langchain_openai",
    "mcp",
    "litellm",
    "langfuse",
}
LIGHT_ENGINE = {part for part in MAY_IMPORT if part.startswith("engine.")}
"""The modules of the engine that the server shares: no torch."""
LIGHT_PARTS = set(MAY_IMPORT) - {"engine", "tiny", "quickstart"}


def part_of(module: str) -> str | None:
    """`understudy.engine.protocol` -> `engine.protocol`; None for another distribution."""
    names = module.split(".")
    if names[0] == "understudy_langgraph":
        return "understudy_langgraph"
    if names[0] != "understudy" or len(names) == 1:
        return None
    inside = ".".join(names[1:3])
    return inside if inside in LIGHT_ENGINE else names[1]


def imports_of(path: Path, module: str) -> list[tuple[int, str]]:
    """Every absolute module name imported anywhere in a file, with its line."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{prefix}.{alias.name}") for alias in node.names]
    return found


def modules(root: Path) -> list[tuple[Path, str]]:
    names = [(path, ".".join(path.relative_to(root).with_suffix("").parts)) for path in sorted(root.rglob("*.py"))]
    return [(path, name.removesuffix(".__init__")) for path, name in names]


def test_every_module_of_the_package_imports_only_what_its_part_may() -> None:
    faults: list[str] = []
    for path, module in modules(ROOT / "src"):
        part = part_of(module)
        if part is None:
            continue
        for line, imported in imports_of(path, module):
            target = part_of(imported)
            if target is not None and target != part and target not in MAY_IMPORT[part]:
                faults.append(f"{path.relative_to(ROOT)}:{line} {part} may not import {target}")
    assert faults == []


def test_only_the_engine_the_tiny_policy_and_the_quickstart_import_heavy_packages() -> None:
    faults: list[str] = []
    for path, module in modules(ROOT / "src"):
        if part_of(module) in LIGHT_PARTS:
            faults += [
                f"{path.relative_to(ROOT)}:{line} imports {imported}"
                for line, imported in imports_of(path, module)
                if imported.split(".")[0] in HEAVY
            ]
    assert faults == []


def test_integrations_import_public_names_only() -> None:
    faults: list[str] = []
    for path, module in modules(ROOT / "integrations"):
        own = module.split(".")[0]
        for line, imported in imports_of(path, module):
            names = imported.split(".")
            if names[0].startswith("understudy_") and names[0] != own:
                faults.append(f"{path.relative_to(ROOT)}:{line} imports another integration: {imported}")
            if part_of(imported) in {"server", "engine", *LIGHT_ENGINE}:
                faults.append(f"{path.relative_to(ROOT)}:{line} imports {imported}")
    assert faults == []


def test_files_stay_under_400_lines_and_functions_under_50() -> None:
    faults: list[str] = []
    for root in (ROOT / "src", ROOT / "integrations"):
        for path, _ in modules(root):
            text = path.read_text(encoding="utf-8")
            if text.count("\n") >= 400:
                faults.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > 50:
                        faults.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert faults == []


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils.py", "helpers.py", "common.py", "misc.py"}
    compat = ROOT / "src/understudy/compat"  # names there are those of another library
    found = [path for path in ROOT.glob("*/**/*.py") if path.name in drawers and ".venv" not in path.parts]
    assert [str(path) for path in found if compat not in path.parents] == []


def test_no_handler_swallows_an_error() -> None:
    faults: list[str] = []
    for root in (ROOT / "src", ROOT / "integrations"):
        for path, _ in modules(root):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ExceptHandler) and len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
                    faults.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert faults == []
