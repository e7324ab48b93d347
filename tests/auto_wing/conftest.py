"""A folder of its own for each test; retries come quickly; litellm stays off the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbook.llms import llm


@pytest.fixture(autouse=True)
def folder(litellm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The current folder, with a cache of its own."""
    monkeypatch.setattr(llm, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.chdir(tmp_path)
    return tmp_path
