"""Node 22 and the clients that run on it, as `make node-clients` installs them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import ROOT

NODE_CLIENTS = ROOT / "tests" / "client" / "node"
OLDEST = 22


def node_program(require: Callable[[bool, str], None]) -> Path:
    """The Node to run the clients with: the machine's if it is recent, else the installed one. Skips where there is none."""
    if shutil.which("npm") is None:
        pytest.skip("not available: npm, and then make node-clients")
    require((NODE_CLIENTS / "node_modules").exists(), "make node-clients")
    installed = sorted((NODE_CLIENTS / "node_modules").glob("node-*/bin/node"))
    found = shutil.which("node")
    for program in [*installed, *([Path(found)] if found else [])]:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
        if said.returncode == 0 and int(said.stdout.lstrip("v").partition(".")[0]) >= OLDEST:
            return program
    pytest.skip(f"not available: Node {OLDEST}, which has no npm package for this machine")
