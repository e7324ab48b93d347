"""Command-line agents: those on PATH, or fetched from npm."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable

import pytest

PACKAGES = {
    "claude": "@anthropic-ai/claude-code@2.1.332",
    "codex": "@openai/codex@0.169.0",
    "gemini": "@google/gemini-cli@0.61.0",
}
FETCH = "OFFBOOK_TEST_FETCH"


@pytest.fixture(scope="session")
def command_line_agent(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """`command_line_agent("claude")`: the path of the program. Skips where it is not on PATH, unless OFFBOOK_TEST_FETCH=1."""
    fetched = tmp_path_factory.mktemp("npm")

    def path(name: str) -> str:
        if found := shutil.which(name):
            return found
        if os.environ.get(FETCH) != "1":
            pytest.skip(f"not available: {name} on PATH; {FETCH}=1 fetches it from npm, hundreds of megabytes")
        program = fetched / "node_modules" / ".bin" / name
        if not program.exists():
            words = ["npm", "install", "--prefix", str(fetched), "--no-audit", "--no-fund", "--silent", PACKAGES[name]]
            subprocess.run(words, check=True, timeout=600)
        return str(program)

    return path
