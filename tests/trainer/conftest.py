"""Models on the server that all tests share."""

from __future__ import annotations

import pytest

from understudy import LocalBackend, TrainableModel
from understudy.types import new_id


@pytest.fixture
def model(local_backend: LocalBackend) -> TrainableModel:
    """A fresh model."""
    return TrainableModel(name=new_id("agent"), base_model="tiny", backend=local_backend)
