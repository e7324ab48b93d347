"""The policy that answers in the catalogue: the real server, and a scripted model that does what it is told behind it."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from offbook.testing import ScriptedServer

from .apps import DEAD
from .policy import Policy


@pytest.fixture
def policy(obedient: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> Generator[Policy]:
    """The policy, in an environment in which models that an app makes by name cannot be reached either."""
    for provider in ("OPENAI", "ANTHROPIC", "GROQ"):
        monkeypatch.setenv(f"{provider}_API_KEY", "unused")
        monkeypatch.setenv(f"{provider}_BASE_URL", DEAD)
    yield Policy(obedient)
    obedient.sampler.refusals.clear()
    obedient.sampler.piece_seconds = 0.0
