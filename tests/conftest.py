"""What all tests share: the slow tier, a skip that continuous integration does not accept, one server, a browser,
and litellm kept from the network."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import offbook

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny, and tests share the cores
gc.disable()  # while tests are collected: their imports leave nothing to collect, and cost a fifth more with it
AXE = Path(__file__).parent / "dashboard/node_modules/axe-core/axe.min.js"
LONGEST = ("test_kills.py", "test_notebooks.py", "test_wings.py")
"""Files of minutes: with --all they come first, so that no process ends with one of them alone."""
SLOW = pytest.StashKey[Counter[str]]()
"""How many slow tests were left out, by their reason."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="also run the tests marked slow, and all property test examples"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SLOW] = Counter()
    hypothesis.settings.register_profile("all", deadline=None)
    hypothesis.settings.register_profile("quick", max_examples=25, deadline=None)
    hypothesis.settings.load_profile("all" if config.getoption("all") else "quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked `slow`, unless `--all`. Then the longest files come first."""
    if config.getoption("all"):
        items.sort(key=lambda item: item.path.name not in LONGEST)
        return
    reasons = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("slow"))}
    config.stash[SLOW].update(reasons.values())
    config.hook.pytest_deselected(items=list(reasons))
    items[:] = [item for item in items if item not in reasons]


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect what a file leaves open at its end: a warning of it then names the next file's first test, not any later one.

    A capture left open fails the test that left it.
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # the next collection looks only at what came after: modules alone are 400,000 objects, 0.25 s of CPU
    assert offbook.current_trajectory() is None, "this test left a capture open: the next tests would run inside it"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let the last collection see all objects. In a worker of xdist: hand the count to the process that reports."""
    gc.unfreeze()
    if output := getattr(session.config, "workeroutput", None):
        output["slow"] = dict(session.config.stash[SLOW])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """In the process that reports: every worker has collected, and so left out, the same."""
    node.config.stash[SLOW] = Counter(getattr(node, "workeroutput", {}).get("slow", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if reasons := config.stash[SLOW]:
        told = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"{reasons.total()} slow tests left out, run them with --all: {told}")


@pytest.fixture(scope="session")
def require() -> Callable[[bool, str], None]:
    """`require(available, "command that enables it")`: skips, or fails under OFFBOOK_TEST_REQUIRE=1."""

    def check(available: bool, command: str) -> None:
        if available:
            return
        if os.environ.get("OFFBOOK_TEST_REQUIRE"):
            pytest.fail(f"not available, and OFFBOOK_TEST_REQUIRE is set: {command}")
        pytest.skip(f"enable with: {command}")

    return check


@pytest.fixture(scope="session")
def local_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offbook.LocalBackend]:
    """One server with the tiny policy for all tests that need a real one; give each test its own model name."""
    backend = offbook.LocalBackend(tmp_path_factory.mktemp("offbook"), threads=1)
    yield backend
    backend.close()


@pytest.fixture
def litellm(require: Callable[[bool, str], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module. Imported here and not by tests: it fetches prices, loads a .env and warns when it is imported."""
    require(find_spec("litellm") is not None, "pip install -r requirements/test.txt")
    for name in ("LITELLM_LOCAL_MODEL_COST_MAP", "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS"):
        monkeypatch.setenv(name, "True")
    monkeypatch.setenv("LITELLM_MODE", "PRODUCTION")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Any = importlib.import_module("litellm")
        module.suppress_debug_info = True
        yield module


@pytest.fixture(scope="session")
def axe(require: Callable[[bool, str], None]) -> str:
    """The source of axe-core."""
    if shutil.which("npm") is None:
        pytest.skip("not available: npm, and then make page-tools")
    require(AXE.exists(), "make page-tools")
    return AXE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def chromium(require: Callable[[bool, str], None]) -> Iterator[Any]:
    """A browser, Debian's: nothing is downloaded. Only for one module: while Playwright runs, its event loop does, and no
    other test of the process could run one."""
    require(find_spec("playwright") is not None, "pip install -r requirements/test.txt")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None and (os.geteuid() != 0 or shutil.which("apt-get") is None):
        pytest.skip("not available: Chromium")
    require(path is not None, "apt-get install chromium")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    playwright = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
