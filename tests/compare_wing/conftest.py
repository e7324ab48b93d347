"""Retries come quickly; the e-mail example is found by path; a folder for apps of tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offbook.llms import llm
from tests.mcp_training.conftest import obedient, stand_in  # noqa: F401  # fixtures
from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "examples"))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds between attempts."""
    monkeypatch.setattr(llm, "FIRST_WAIT", 0.01)


@pytest.fixture
def app_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, where apps are imported from. The model that an app names itself cannot be reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    monkeypatch.setenv("OPENAI_API_BASE", "http://127.0.0.1:9")
    monkeypatch.setenv("OFFBOOK_DIR", str(tmp_path / "own"))
    return tmp_path
