"""Servers that nobody here wrote, and one that goes wrong as it is told."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from offbook_mcp import StdioServer, Target
from tests.paths import ROOT

SERVERS = Path(__file__).parent / "servers"
NODE_HINT = "make mcp-servers"


def misbehaving(mode: str, **options: object) -> Target:
    """The small server of `servers/misbehaving.py`."""
    server = StdioServer("odd", sys.executable, ("-I", "-S", str(SERVERS / "misbehaving.py"), mode))
    return Target((server,), **{"allow_all": True, **options})  # type: ignore[arg-type]


def python_module(name: str, *arguments: str) -> str:
    """A command line that runs a module of this environment."""
    return shlex.join([sys.executable, "-m", name, *arguments])


def node_modules() -> Path | None:
    """Where the Node servers are: OFFBOOK_MCP_NODE, or a `node_modules` of the checkout or of these tests."""
    places = [ROOT / "node_modules", Path(__file__).parent / "node_modules"]
    if named := os.environ.get("OFFBOOK_MCP_NODE"):
        places.insert(0, Path(named))
    return next((place for place in places if (place / "@modelcontextprotocol").is_dir()), None)


@pytest.fixture(scope="session")
def node_server() -> Callable[[str], str]:
    """`node_server("memory")` -> its command line; skips where it is not installed."""

    def command(name: str) -> str:
        folder = node_modules()
        script = folder and folder / "@modelcontextprotocol" / f"server-{name}" / "dist" / "index.js"
        if script is None or not script.is_file() or shutil.which("node") is None:
            pytest.skip(f"the MCP server {name!r} needs Node and: {NODE_HINT}")
        return shlex.join(["node", str(script)])

    return command


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with two commits, always the same."""
    folder = tmp_path_factory.mktemp("repository")
    fixed = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in IDENTITY.items()}
    env = os.environ | fixed | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(folder), *words], check=True, env=env, capture_output=True)

    git("init", "-b", "main")
    for number, text in enumerate(["teal\n", "teal\nochre\n"]):
        (folder / "colours.txt").write_text(text)
        git("add", ".")
        git("commit", "-m", f"colour {number}")
    return folder


IDENTITY = {"NAME": "Ada", "EMAIL": "ada@example.com", "DATE": "2026-01-03T10:00:00+00:00"}


_of_others: set[int] = set()
"""Processes that ran below us before a test began: other tests' servers."""


@pytest.fixture(autouse=True)
def processes_of_others() -> None:
    """Remembers what ran before the test began, so that `children` leaves it out."""
    _of_others.clear()
    _of_others.update(child.pid for child in psutil.Process().children(recursive=True))


def children() -> set[int]:
    """The processes that a test has started, except the one that watches over the servers, and zombies."""
    below = psutil.Process().children(recursive=True)
    return {child.pid for child in below if child.pid not in _of_others and is_server(child)}


def is_server(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
        return process.status() != psutil.STATUS_ZOMBIE and not any(word.endswith("reaper.py") for word in words)
    except psutil.NoSuchProcess:
        return False
