"""Models on the server that all tests share."""

from __future__ import annotations

import pytest

from offbook import LocalBackend, TrainableModel
from offbook.base.types import new_id


@pytest.fixture
def model(local_backend: LocalBackend) -> TrainableModel:
    """A fresh model."""
    return TrainableModel(name=new_id("agent"), base_model="tiny", backend=local_backend)
