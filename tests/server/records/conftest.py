"""The records under test, on SQLite and PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from understudy.server.records.store import Store
from understudy.server.records.tables import metadata

POSTGRES = os.environ.get("UNDERSTUDY_TEST_POSTGRES")
"""A SQLAlchemy URL of an empty database, such as postgresql+psycopg://localhost/understudy_test."""


@pytest.fixture
def postgres(require: Callable[[bool, str], None]) -> str:
    """The URL of a PostgreSQL database without our tables."""
    require(POSTGRES is not None, "UNDERSTUDY_TEST_POSTGRES=<SQLAlchemy URL of an empty database> make test")
    engine = sa.create_engine(str(POSTGRES))
    metadata.drop_all(engine)
    engine.dispose()
    return str(POSTGRES)


@pytest.fixture(params=["sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres")
    opened = await Store.open(url)
    yield opened
    await opened.close()
