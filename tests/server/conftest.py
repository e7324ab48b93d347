"""What the server's tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.gateway import Gateway, gateway_over
from tests.fakes.scripted_sampler import scripted_sampler


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with scripted_sampler() as scripted, gateway_over(scripted, tmp_path) as made:
        yield made
