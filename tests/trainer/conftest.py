"""A real server for the whole module, with the bundled policy."""

from __future__ import annotations

from collections.abc import Generator
from itertools import count

import pytest

from understudy import LocalBackend, TrainableModel


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Generator[LocalBackend]:
    backend = LocalBackend(dir=tmp_path_factory.mktemp("server"), threads=1)
    yield backend
    backend.close()


_names = count()


@pytest.fixture
def model(backend: LocalBackend) -> TrainableModel:
    """A fresh model on it."""
    return TrainableModel(name=f"agent-{next(_names)}", base_model="tiny", backend=backend)
