"""The server that other agent libraries are pointed at: the real one, and a scripted model that does what it is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offbook import LocalBackend, TrainableModel
from offbook.base.types import new_id
from offbook.testing import ScriptedServer, scripted_server
from tests.fakes.obedient_policy import obey


@pytest.fixture(scope="session")
def obedient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """One for all tests of the folder."""
    with scripted_server(obey, tmp_path_factory.mktemp("obedient")) as running:
        yield running


@pytest.fixture
def served(obedient: ScriptedServer) -> ScriptedServer:
    """The server, with nothing received yet."""
    obedient.sampler.received.clear()
    return obedient


@pytest.fixture
def model(local_backend: LocalBackend) -> TrainableModel:
    """A fresh model on the real engine."""
    return TrainableModel(name=new_id("agent"), base_model="tiny", backend=local_backend)
