"""Models on the server that all tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offbook import LocalBackend, RemoteBackend, TrainableModel
from offbook.base.types import new_id
from offbook.testing import ScriptedServer, scripted_server
from tests.fakes.obedient_policy import obey


@pytest.fixture
def model(local_backend: LocalBackend) -> TrainableModel:
    """A fresh model."""
    return TrainableModel(name=new_id("agent"), base_model="tiny", backend=local_backend)


@pytest.fixture(scope="session")
def obedient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """The real server over a scripted model that does what it is told."""
    with scripted_server(obey, tmp_path_factory.mktemp("obedient")) as running:
        yield running


@pytest.fixture
def stand_in(obedient: ScriptedServer) -> TrainableModel:
    """A model there."""
    return TrainableModel(name=new_id("agent"), base_model="tiny", backend=RemoteBackend(obedient.url))
