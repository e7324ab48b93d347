"""The server that other agent libraries are pointed at: the real one, and a scripted model that does what it is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.obedient_policy import obey
from tests.fakes.served_gateway import ServedGateway, served_gateway
from understudy import LocalBackend, TrainableModel
from understudy.types import new_id


@pytest.fixture(scope="session")
def obedient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedGateway]:
    """One for all tests of the folder."""
    with served_gateway(obey, tmp_path_factory.mktemp("obedient")) as running:
        yield running


@pytest.fixture
def served(obedient: ServedGateway) -> ServedGateway:
    """The server, with nothing received yet."""
    obedient.sampler.received.clear()
    return obedient


@pytest.fixture
def model(local_backend: LocalBackend) -> TrainableModel:
    """A fresh model on the real engine."""
    return TrainableModel(name=new_id("agent"), base_model="tiny", backend=local_backend)
