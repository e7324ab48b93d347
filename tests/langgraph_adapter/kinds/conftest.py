"""The policy that answers in the catalogue: the real server, and a scripted model that does what it is told behind it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from fakes.obedient_policy import obey
from fakes.served_gateway import ServedGateway, served_gateway

from .apps import DEAD
from .policy import Policy


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    """One server for the whole catalogue."""
    with served_gateway(obey, Path(tmp_path_factory.mktemp("gateway"))) as running:
        yield running


@pytest.fixture
def policy(server: ServedGateway, monkeypatch: pytest.MonkeyPatch) -> Generator[Policy]:
    """The policy, in an environment in which models that an app makes by name cannot be reached either."""
    for provider in ("OPENAI", "ANTHROPIC", "GROQ"):
        monkeypatch.setenv(f"{provider}_API_KEY", "unused")
        monkeypatch.setenv(f"{provider}_BASE_URL", DEAD)
    yield Policy(server)
    server.sampler.refusals.clear()
    server.sampler.piece_seconds = 0.0
