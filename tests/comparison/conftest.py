"""Retries come quickly; the e-mail example is found by path."""

from __future__ import annotations

import sys

import pytest

from tests.paths import ROOT
from understudy.llms import question

sys.path.insert(0, str(ROOT / "examples" / "langgraph_email_agent"))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Milliseconds between attempts."""
    monkeypatch.setattr(question, "FIRST_WAIT", 0.01)
