"""Each wing comes off: without its folder, tests, docs and entry points the core works, and no word of it is left there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.paths import ROOT


@dataclass(frozen=True)
class Wing:
    """What comes off together. `folders`: in integrations/, the wing first, then those that are built on it. `words`: what
    src/offbook must not say, as a regular expression. `files`: those of other wings that only it loads."""

    folders: tuple[str, ...]
    commands: tuple[str, ...]
    words: str
    tests: tuple[str, ...] = ()
    docs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


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
        ("offbook_production/pages.py",),
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
LEFT_OUT = shutil.ignore_patterns("__pycache__", "node_modules", ".venv", ".hypothesis", ".pytest_cache")
QUICK = ("test_public_names.py", "test_layers.py", "test_plugins.py", "scenarios", "rewards")
"""The core's tests that show most of it in the least time."""
WITHOUT_CHECKOUT = """
import sys

sys.path[:] = [path for path in sys.path if path not in {checkout!r}]
"""
"""The sitecustomize.py of the copy: it hides the packages of this checkout, which an editable install adds."""
IMPORTS = """
import importlib, importlib.util, pathlib, sys
from offbook.base.errors import MissingExtraError

assert [name for name in sys.argv[1:] if importlib.util.find_spec(name)] == []
for root in ("src", "integrations"):
    for path in sorted(pathlib.Path(root).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[:2] == ("offbook", "engine") or parts[-1].startswith("__"):
            continue  # the engine imports no wing and takes half a minute
        try:
            importlib.import_module(".".join(parts))
        except (ImportError, MissingExtraError) as error:
            assert not str(getattr(error, "name", "")).startswith("offbook"), (path, error)
"""


@pytest.fixture(params=WINGS)
def wing(request: pytest.FixtureRequest) -> Wing:
    return WINGS[request.param]


@pytest.fixture
def tree(wing: Wing, tmp_path: Path) -> Path:
    """A copy of the checkout without the wing."""
    for name in ("src", "integrations", "tests", "docs", "policies"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=LEFT_OUT)
    gone = [tmp_path / "integrations" / name for name in wing.folders] + [
        tmp_path / "tests" / name for name in wing.tests
    ]
    for folder in gone:
        shutil.rmtree(folder)
    for name in wing.files:
        (tmp_path / "integrations" / name).unlink()
    for page in wing.docs:
        (tmp_path / "docs" / page).unlink()
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    kept = [line for line in text.splitlines() if not re.match(rf"[\w-]+ = \"({'|'.join(wing.folders)})\b", line)]
    (tmp_path / "pyproject.toml").write_text("\n".join(kept))
    installed = tmp_path / "src" / "offbook-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.4\nName: offbook\nVersion: 0.1.0\n")
    groups = tomllib.loads("\n".join(kept))["project"]["entry-points"]
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    checkout = [str(ROOT), str(ROOT / "src"), str(ROOT / "integrations")]
    (tmp_path / "src" / "sitecustomize.py").write_text(WITHOUT_CHECKOUT.format(checkout=checkout))
    return tmp_path


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


def test_the_core_and_the_other_integrations_import_and_know_no_command_of_it(wing: Wing, tree: Path) -> None:
    run(tree, "-c", IMPORTS, *wing.folders)
    listed = run(tree, "-m", "offbook", "--help")
    assert [name for name in wing.commands if re.search(rf"^ +{name} ", listed, re.MULTILINE)] == []
    assert re.search(r"^ +train ", listed, re.MULTILINE)


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


@pytest.mark.slow("the core's quick tests and a step of the quickstart, in a copy for each wing")
def test_the_cores_quick_tests_and_the_quickstarts_first_step_pass(wing: Wing, tree: Path) -> None:
    run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in QUICK))
    run(tree, "-m", "offbook", "quickstart", "--steps", "1")
