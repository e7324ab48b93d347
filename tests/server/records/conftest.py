"""The records under test, on SQLite and PostgreSQL."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from offbook.server.records.store import Store

DATABASE = os.environ.get("OFFBOOK_TEST_POSTGRES")
"""A SQLAlchemy URL of an empty database, such as postgresql+psycopg://localhost/offbook_test."""
SCHEMA = f"offbook_{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
"""Each test process has tables of its own in it."""
POSTGRES = (
    sa.make_url(DATABASE)
    .update_query_dict({"options": f"-csearch_path={SCHEMA}"})
    .render_as_string(hide_password=False)
    if DATABASE
    else None
)


@pytest.fixture
def postgres(require: Callable[[bool, str], None]) -> str:
    """The URL of a PostgreSQL database without our tables."""
    require(POSTGRES is not None, "OFFBOOK_TEST_POSTGRES=<SQLAlchemy URL of an empty database> make test")
    engine = sa.create_engine(str(POSTGRES))
    with engine.begin() as connection:
        connection.execute(sa.schema.DropSchema(SCHEMA, cascade=True, if_exists=True))
        connection.execute(sa.schema.CreateSchema(SCHEMA))
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
