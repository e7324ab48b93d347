"""The import direction of the design, held as a table."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import offbook
from tests.paths import ROOT

USER = {"base", "contracts", "plugins"}
"""What every room of the user's process may import."""

SHARED_ENGINE = {"engine.protocol", "engine.checkpoint_files", "engine.token_file", "engine.token_tree"}
"""The modules of the engine that the server shares: no torch."""

CLIENT = {"client", "client.connection", "client.rollouts"}
ENGINE = {"base", *SHARED_ENGINE, "engine", "engine.sampling"}
LEARNER = "engine.learner"
"""Its rooms in the order in which data passes them: a job's targets, the rows that compute them, the model's logprobs of
the rows, the update. What runs a step stands beside them."""
ADAPTERS = {
    "offbook",
    *USER,
    *CLIENT,
    "http_listener",
    "llms",
    "openai_dialect",
    "rewards",
    "scenarios",
    "supervised",
    "supervised.masking",
    "tracing",
    "trainer",
}
"""What the adapters in integrations/ may import: never the server or the engine."""
COMMAND_OPTIONS = {f"commands.{name}" for name in ("generated_options", "help_pages", "option_values", "options")}
INTEGRATIONS = {path.name for path in (ROOT / "integrations").iterdir() if path.name.startswith("offbook_")}

SERVER_WING = ADAPTERS | {"commands", "commands.help_pages", "commands.options", "server", "engine.checkpoint_files"}
"""What a wing with a part of the server may import: its door, `server.wing`, and what that hands out."""

# For each part of the package: the other parts it may import.
MAY_IMPORT: dict[str, set[str]] = {
    "base": set(),
    "contracts": {"base"},
    "plugins": {"base", "contracts"},
    "tiny": {"base"},
    "openai_dialect": {"base"},
    "http_listener": {"base", "openai_dialect"},
    "memory_plan": {"base", "tiny"},
    "client.connection": USER,
    "client.rollouts": USER | {"client.connection"},
    "scenarios.file_rows": {"base"},
    "supervised.masking": {"base"},
    "supervised": USER
    | {"client.connection", "client.rollouts", "openai_dialect", "scenarios.file_rows", "supervised.masking"},
    "client": USER | {"client.connection", "client.rollouts", "supervised", "supervised.masking"},
    "llms": USER,
    "rewards": USER | {*CLIENT, "llms"},
    "scenarios": USER | CLIENT | {"scenarios.file_rows"},
    "tracing": USER | CLIENT,
    "trainer": USER | {*CLIENT, "llms", "rewards", "scenarios", "scenarios.file_rows", "tracing"},
    "processes": USER | {*CLIENT, "rewards", "scenarios", "trainer"},
    "quickstart": USER | {*CLIENT, "rewards", "scenarios", "tracing", "trainer", "offbook_langgraph"},
    "commands.options": {"base", "commands.help_pages"},
    "commands.help_pages": {"base"},
    "commands.generated_options": {"base", "commands.help_pages"},
    "commands.option_values": USER
    | {*CLIENT, "commands.generated_options", "commands.options", "rewards", "tracing", "trainer"},
    "commands": USER
    | {
        *CLIENT,
        "commands.generated_options",
        "commands.help_pages",
        "commands.option_values",
        "commands.options",
        "http_listener",
        "llms",
        "memory_plan",
        "processes",
        "quickstart",
        "scenarios",
        "server",
        "supervised",
        "supervised.masking",
        "tracing",
        "trainer",
    },
    "__main__": {"commands"},
    "server.__main__": {"commands"},
    "engine.protocol": {"base"},
    "engine.checkpoint_files": {"base"},
    "engine.token_file": {"base", "engine.checkpoint_files"},
    "engine.token_tree": {"base", "engine.protocol"},
    "engine.sampling": set(),
    "engine": {"base", *SHARED_ENGINE, "engine.inference", "openai_dialect"},
    "engine.import_check": {"base", f"{LEARNER}.model"},
    "engine.inference": ENGINE | {"openai_dialect"},
    f"{LEARNER}.targets": ENGINE | {"engine.inference"},
    f"{LEARNER}.rows": {"base", *SHARED_ENGINE},
    f"{LEARNER}.model": ENGINE | {f"{LEARNER}.targets", f"{LEARNER}.rows"},
    f"{LEARNER}.update": {"base", *SHARED_ENGINE, "engine.sampling", f"{LEARNER}.targets", f"{LEARNER}.rows"},
    LEARNER: ENGINE | {f"{LEARNER}.{room}" for room in ("targets", "rows", "model", "update")},
    "server": {
        "base",
        "contracts",
        "plugins",
        "http_listener",
        "llms",
        "openai_dialect",
        "memory_plan",
        *SHARED_ENGINE,
        "supervised.masking",
        "tiny",
    },
    "testing": USER | {"openai_dialect", "rewards", "server", "tracing"},
    "offbook_art": ADAPTERS | {"offbook_langgraph", "*"},
    "offbook_bases": {"base", "plugins", "tiny"},
    "offbook_cloud": SERVER_WING,
    "offbook_dialects": SERVER_WING,
    "offbook_langgraph": ADAPTERS,
    "offbook_mcp": ADAPTERS | COMMAND_OPTIONS,
    "offbook_compare": ADAPTERS | COMMAND_OPTIONS,
    "offbook_dashboard": SERVER_WING | {"engine.token_file", "engine.token_tree", "tiny"},
    "offbook_auto": ADAPTERS
    | COMMAND_OPTIONS
    | {"offbook_compare", "offbook_mcp", "offbook_production", "scenarios.file_rows"},
    "offbook_langfuse": ADAPTERS | {"offbook_sinks"},
    "offbook_sinks": ADAPTERS,
    "offbook_production": SERVER_WING | COMMAND_OPTIONS | {"engine.token_file"},
    "offbook_ray": ADAPTERS,
}
"""The public names (`offbook.__init__`) may name any part: they are loaded lazily."""

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
LIGHT_PARTS = {
    part for part in MAY_IMPORT if part in SHARED_ENGINE or part.split(".")[0] not in {"engine", "quickstart"}
}


def part_of(module: str) -> str | None:
    """The longest name in the table: `offbook.engine.protocol.Sample` -> `engine.protocol`; `offbook.Trainer` -> `offbook`;
    None for another distribution."""
    names = module.split(".")
    if names[0].startswith("offbook_") and names[0] in MAY_IMPORT:
        return names[0]
    if names[0] != "offbook" or len(names) == 1 or names[1] == "__version__":
        return None
    if names[1] in offbook.__all__:
        return "offbook"
    inside = [".".join(names[1:end]) for end in range(len(names), 1, -1)]
    return next((part for part in inside if part in MAY_IMPORT), names[1])


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
    for path, module in [*modules(ROOT / "src"), *modules(ROOT / "integrations")]:
        part = part_of(module)
        if part is None:
            continue
        for line, imported in imports_of(path, module):
            target = part_of(imported)
            if target is not None and target != part and target not in MAY_IMPORT[part]:
                faults.append(f"{path.relative_to(ROOT)}:{line} {part} may not import {target}")
    assert faults == []


def test_only_the_engine_and_the_quickstart_import_heavy_packages() -> None:
    faults: list[str] = []
    for path, module in modules(ROOT / "src"):
        if part_of(module) in LIGHT_PARTS:
            faults += [
                f"{path.relative_to(ROOT)}:{line} imports {imported}"
                for line, imported in imports_of(path, module)
                if imported.split(".")[0] in HEAVY
            ]
    assert faults == []


def test_one_module_of_the_whole_project_imports_litellm() -> None:
    """Also by `importlib.import_module("litellm")`, which an import statement does not show."""
    loads = re.compile(r"""^\s*(?:import|from)\s+litellm\b|import_module\(\s*["']litellm\b""", re.MULTILINE)
    users = [
        str(path.relative_to(ROOT))
        for root in ("src", "integrations", "examples", "benchmarks")
        for path, _ in modules(ROOT / root)
        if loads.search(path.read_text("utf-8"))
    ]
    assert users == ["src/offbook/llms/provider.py"]


@pytest.mark.parametrize(
    ("line", "target"),
    [
        ("from offbook.server.http import app", "server"),
        ("from offbook import engine", "engine"),
        ("import offbook.server.records", "server"),
        ("from offbook_other import x", None),
        ("if TYPE_CHECKING:\n    from offbook.server.records import store", "server"),
        ("def late():\n    from offbook.server import app", "server"),
    ],
)
def test_where_an_import_of_an_adapter_leads(line: str, target: str | None, tmp_path: Path) -> None:
    file = tmp_path / "adapter.py"
    file.write_text(f"{line}\n")
    [found] = {part_of(imported) for _, imported in imports_of(file, "offbook_mcp.adapter")}
    assert found == target and target not in MAY_IMPORT["offbook_mcp"]


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module -> the modules of the same root that it imports anywhere, also for type checkers only. The lazy
    `offbook/__init__.py` is left out: whatever its names load is loaded when one is used."""
    files = {module: path for path, module in modules(root) if module != "offbook"}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        names = [imported for _, imported in imports_of(path, module)]
        targets = {name if name in files else name.rpartition(".")[0] for name in names}
        graph[module] = {target for target in targets if target in files and target != module}
    return graph


def first_cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("root", ["src", "integrations"])
def test_no_modules_import_each_other_in_a_circle_not_even_for_type_checkers(root: str) -> None:
    assert first_cycle(import_graph(ROOT / root)) == []


def test_a_circle_that_exists_only_for_type_checkers_is_a_fault(tmp_path: Path) -> None:
    package = tmp_path / "sample"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text("from .b import B\n")
    (package / "b.py").write_text("if TYPE_CHECKING:\n    from .a import A\n")
    assert set(first_cycle(import_graph(tmp_path))) == {"sample.a", "sample.b"}


def public_classes() -> dict[str, list[str]]:
    """Public class name -> the files that define one at their top level; names of `offbook_art` are another library's."""
    places: dict[str, list[str]] = {}
    for root in (ROOT / "src", ROOT / "integrations"):
        for path, _ in modules(root):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and "offbook_art" not in path.parts:
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    return places


def test_a_public_class_name_occurs_once() -> None:
    assert {name: files for name, files in public_classes().items() if len(files) > 1} == {}


def test_a_file_over_600_lines_gives_its_reason_and_functions_stay_under_50() -> None:
    """A module holds one whole idea. One that needs more than 600 lines says why: a line `# Over 600 lines: ...`."""
    faults: list[str] = []
    for root in (ROOT / "src", ROOT / "integrations"):
        for path, _ in modules(root):
            text = path.read_text(encoding="utf-8")
            if text.count("\n") > 600 and "\n# Over 600 lines: " not in text:
                faults.append(f"{path.relative_to(ROOT)}: {text.count(chr(10))} lines")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > 50:
                        faults.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {length} lines")
    assert faults == []


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils.py", "helpers.py", "common.py", "misc.py"}
    art = ROOT / "integrations/offbook_art"  # names there are those of another library
    found = [path for path in ROOT.glob("*/**/*.py") if path.name in drawers and ".venv" not in path.parts]
    assert [str(path) for path in found if art not in path.parents] == []


def test_no_handler_swallows_an_error() -> None:
    faults: list[str] = []
    for root in (ROOT / "src", ROOT / "integrations"):
        for path, _ in modules(root):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ExceptHandler) and len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
                    faults.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert faults == []
