"""Each wing comes off: without its folder, tests, docs and entry points the core works, and no word of it is left there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.paths import ROOT


@dataclass(frozen=True)
class Wing:
    """What comes off together. `folders`: in integrations/, the wing first, then those that are built on it. `words`: what
    src/offbook must not say, as a regular expression."""

    folders: tuple[str, ...]
    commands: tuple[str, ...]
    words: str
    tests: tuple[str, ...] = ()
    docs: tuple[str, ...] = ()


WINGS = {
    "compare": Wing(
        ("offbook_compare", "offbook_auto"),
        ("compare", "auto", "improve", "learn"),
        r"offbook.compare\b|acompare|CompareOptions|ComparisonReport",
        ("compare_wing", "auto_wing"),
        ("comparing.md", "auto.md", "improve.md"),
    ),
    "auto": Wing(
        ("offbook_auto",),
        ("auto", "improve", "learn"),
        r"offbook.(auto|improve|learn)\b|AutoTrainer|Improver\b",
        ("auto_wing",),
        ("auto.md", "improve.md"),
    ),
    "bases": Wing(
        ("offbook_bases",),
        ("base",),
        r"offbook.bases\.\w|offbook base (add|list|remove)|(?i:smollm2|gguf_file)",
        ("bases",),
        ("bases.md",),
    ),
    "cloud": Wing(("offbook_cloud",), ("push", "pull"), r"\bmirror", ("cloud",)),
    "dashboard": Wing(
        ("offbook_dashboard",),
        ("ui",),
        r"(?i)dashboard|offbook ui\b|offbook\.pages|sign_in_page",
        ("dashboard",),
        ("dashboard.md",),
    ),
    "dialects": Wing(
        ("offbook_dialects",),
        (),
        r"GenerateContent|countTokens|count_tokens|/v1/(messages|responses)",
        ("dialects_wing",),
        ("apis.md",),
    ),
    "ray": Wing(("offbook_ray",), (), r"\bRay\b|RayRunner|ray_(?!cluster)", ("on_ray",)),
    "art": Wing(("offbook_art",), (), r"offbook_art|compat\.art|yield_trajectory", ("art_wing",)),
    "sinks": Wing(
        ("offbook_sinks", "offbook_langfuse"),
        (),
        r"OtlpSink|opentelemetry|traceparent|(Mlflow|Tensorboard|Wandb|Langfuse)Sink",
        ("sinks_wing", "langfuse"),
        ("wandb.md", "langfuse.md", "production_scenarios.md"),
    ),
    "production": Wing(
        ("offbook_production", "offbook_auto"),
        ("audit", "forget", "takeover", "auto", "improve", "learn"),
        r"(?i)takeover|upstream|feedback|\baudit\b|record_share|keep_personal",
        ("production_wing", "auto_wing"),
        ("gateway.md", "learning_on.md", "auto.md", "improve.md"),
    ),
}
LEFT_OUT = shutil.ignore_patterns("node_modules", ".venv", ".hypothesis", ".pytest_cache")
"""Of a copy. Bytecode is copied: its files keep their times, so no process compiles them again."""
HALVES = {
    "service": ("compare", "auto", "bases", "cloud", "production"),
    "views": ("dashboard", "dialects", "ray", "art", "sinks"),
}
"""Wings that come off together in the slow tier: each is off once, beside all wings of the other half."""
QUICK = ("test_public_names.py", "test_layers.py", "test_plugins.py", "scenarios", "rewards")
"""The core's tests that show most of it in the least time."""
WITHOUT_CHECKOUT = """
import sys

sys.path[:] = [path for path in sys.path if path not in {checkout!r}]
"""
"""The sitecustomize.py of the copy: it hides the packages of this checkout, which an editable install adds."""
IMPORTS = """
import importlib, importlib.util, json, os, pathlib, re, runpy, sys, traceback

def modules(root):
    for path in sorted(pathlib.Path(root).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[:2] != ("offbook", "engine") and not parts[-1].startswith("__"):
            yield path, ".".join(parts)  # the engine imports no wing and takes half a minute

def check(tree, gone):
    os.chdir(tree)
    sys.path[:0] = [tree + "/src", tree + "/integrations"]
    importlib.invalidate_caches()
    from offbook.base.errors import MissingExtraError
    assert [name for name in gone if importlib.util.find_spec(name)] == []
    for path, name in [*modules("src"), *modules("integrations")]:
        try:
            importlib.import_module(name)
        except (ImportError, MissingExtraError) as error:
            assert not str(getattr(error, "name", "")).startswith("offbook"), (path, error)
    sys.argv = ["offbook", "--help"]
    runpy.run_module("offbook", run_name="__main__")

def code_of(tree, gone):
    try:
        check(tree, gone)
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
    return 1

checkout, trees = json.loads(sys.argv[1])
sys.path[:] = [path for path in sys.path if path not in (checkout, checkout + "/src", checkout + "/integrations")]
files = [path for root in ("src", "integrations") for path, _ in modules(checkout + "/" + root)]
imported = {name for path in files for name in re.findall(r"^(?:from|import) (\\w[\\w.]*)", path.read_text(), re.MULTILINE)}
for name in sorted(imported):
    if not name.startswith("offbook"):
        try:
            importlib.import_module(name)
        except ImportError:
            pass
codes = {}
for tree, gone in trees:
    child = os.fork()
    if child == 0:
        output = os.open(tree + "/output", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        code = code_of(tree, gone)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code or 0)
    codes[tree] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""
"""Imports what the checkout imports of other packages, once. Then, in a process for each copy, everything of the copy, and
shows the help of the command there, in the copy's file `output`."""


@pytest.fixture(params=WINGS)
def wing(request: pytest.FixtureRequest) -> Wing:
    return WINGS[request.param]


def copy_without(wings: Sequence[Wing], tree: Path) -> None:
    """Copy the packages of the checkout, installed, without these wings."""
    for name in ("src", "integrations"):
        shutil.copytree(ROOT / name, tree / name, ignore=LEFT_OUT)
    folders = {name for wing in wings for name in wing.folders}
    for name in folders:
        shutil.rmtree(tree / "integrations" / name)
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    kept = [line for line in text.splitlines() if not re.match(rf"[\w-]+ = \"({'|'.join(folders)})\b", line)]
    (tree / "pyproject.toml").write_text("\n".join(kept))
    installed = tree / "src" / "offbook-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.4\nName: offbook\nVersion: 0.1.0\n")
    groups = tomllib.loads("\n".join(kept))["project"]["entry-points"]
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    checkout = [str(ROOT), str(ROOT / "src"), str(ROOT / "integrations")]
    (tree / "src" / "sitecustomize.py").write_text(WITHOUT_CHECKOUT.format(checkout=checkout))


def copy_tests_without(wings: Sequence[Wing], tree: Path) -> None:
    """Copy what the core's tests need, without the tests and pages of these wings."""
    for name in ("tests", "docs", "policies"):
        shutil.copytree(ROOT / name, tree / name, ignore=LEFT_OUT)
    for name in {name for wing in wings for name in wing.tests}:
        shutil.rmtree(tree / "tests" / name)
    for page in {page for wing in wings for page in wing.docs}:
        (tree / "docs" / page).unlink()


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Name of a wing -> exit code and output of IMPORTS without it."""
    root = tmp_path_factory.mktemp("wings")
    for name, wing in WINGS.items():
        (root / name).mkdir()
        copy_without([wing], root / name)
    trees = [(str(root / name), wing.folders) for name, wing in WINGS.items()]
    codes: dict[str, int] = json.loads(run(root, "-c", IMPORTS, json.dumps([str(ROOT), trees])).splitlines()[-1])
    return {name: (codes[str(root / name)], (root / name / "output").read_text("utf-8")) for name in WINGS}


def run(tree: Path, *words: str) -> str:
    """The output of Python in the copy."""
    path = ":".join(str(tree / name) for name in ("src", "integrations", "."))
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": path,
        "HOME": str(tree),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run([sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", WINGS)
def test_the_core_and_the_other_integrations_import_and_know_no_command_of_it(
    name: str, imported: dict[str, tuple[int, str]]
) -> None:
    code, output = imported[name]
    assert code == 0, output[-3000:]
    assert [command for command in WINGS[name].commands if re.search(rf"^ +{command} ", output, re.MULTILINE)] == []
    assert re.search(r"^ +train ", output, re.MULTILINE)


def test_no_word_of_it_is_in_the_core(wing: Wing) -> None:
    words = re.compile(wing.words)
    texts = [path for path in (ROOT / "src/offbook").rglob("*") if path.suffix in (".py", ".html", ".js", ".css")]
    said = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert said == []


@pytest.mark.slow("the core's quick tests and a step of the quickstart, in a copy for each half of the wings")
@pytest.mark.parametrize("half", HALVES)
def test_the_cores_quick_tests_and_the_quickstarts_first_step_pass(half: str, tmp_path: Path) -> None:
    assert sorted(name for names in HALVES.values() for name in names) == sorted(WINGS)
    wings = [WINGS[name] for name in HALVES[half]]
    copy_without(wings, tmp_path)
    copy_tests_without(wings, tmp_path)
    run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in QUICK))
    run(tmp_path, "-m", "offbook", "quickstart", "--steps", "1")
