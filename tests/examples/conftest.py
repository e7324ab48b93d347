"""The examples are no part of the package: their modules are found by path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EMAIL_AGENT = Path(__file__).parents[2] / "examples" / "langgraph_email_agent"
sys.path.insert(0, str(EMAIL_AGENT.parent))


@pytest.fixture(scope="session")
def example() -> Path:
    """The folder of the e-mail agent."""
    return EMAIL_AGENT
