"""One server per set of records in PostgreSQL, also when the connection that holds the lock is lost or shared."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from offbook.base.errors import StoreError
from offbook.server.records import ownership
from offbook.server.records.store import Store
from tests.server.records.test_store import a_call

LOCKS = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
TAKEN = (
    r"another server has the records at postgresql.* \(PostgreSQL's process \d+, connected from .*\)\. Use that server"
)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "WAIT_SECONDS", 0.0)


def cut_off(url: str) -> None:
    """Ends the session that holds the lock, as a network or an administrator may."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        for pid in connection.scalars(sa.text(LOCKS)).all():
            connection.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        while connection.scalars(sa.text(LOCKS)).all():
            connection.execute(sa.text("SELECT pg_sleep(0.01)"))
    engine.dispose()


async def test_a_second_server_is_refused_until_the_first_has_ended(postgres: str) -> None:
    first = await Store.open(postgres)
    with pytest.raises(StoreError, match=TAKEN):
        await Store.open(postgres)
    call = await first.add_call(a_call())
    await first.close()
    second = await Store.open(postgres)
    assert await second.call(call.id) == call
    await second.close()


async def test_a_lock_whose_connection_is_lost_is_taken_again(postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "CHECK_SECONDS", 0.05)
    first = await Store.open(postgres)
    cut_off(postgres)
    engine = sa.create_engine(postgres)
    async with asyncio.timeout(30):
        with engine.connect() as connection:
            while not connection.scalars(sa.text(LOCKS)).all():
                await asyncio.sleep(0.02)
    engine.dispose()
    with pytest.raises(StoreError, match=TAKEN):
        await Store.open(postgres)
    await first.add_call(a_call())
    await first.close()


async def test_a_server_that_lost_its_lock_to_another_writes_nothing_more(postgres: str) -> None:
    first = await Store.open(postgres)
    await first.add_call(a_call("before"))
    cut_off(postgres)
    second = await Store.open(postgres)
    with pytest.raises(StoreError, match="another server now owns the records"):
        await first.add_call(a_call("after"))
    await second.add_call(a_call("second"))
    found = await second.calls_of(["before", "after", "second"])
    assert {name: len(calls) for name, calls in found.items()} == {"before": 1, "after": 0, "second": 1}
    await first.close()
    with pytest.raises(StoreError, match=TAKEN):
        await Store.open(postgres)
    await second.close()


@pytest.mark.parametrize("mode", ["transaction", "session"])
async def test_behind_a_pooler_the_lock_needs_sessions_of_its_own(
    postgres: str, mode: str, tmp_path: Path, require: Callable[[bool, str], None]
) -> None:
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    require(program is not None, "apt-get install pgbouncer")
    url = sa.make_url(postgres)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    tmp_path.chmod(0o755)
    (tmp_path / "users").write_text(f'"{url.username}" ""\n')
    (tmp_path / "ini").write_text(
        f"[databases]\n* = host={url.query['host']}\n[pgbouncer]\nlisten_addr=127.0.0.1\nlisten_port={port}\nunix_socket_dir=\n"
        f"auth_type=trust\nauth_file={tmp_path}/users\npool_mode={mode}\nserver_round_robin=1\n"
        "default_pool_size=9\nmin_pool_size=5\nignore_startup_parameters=options\n"
    )
    pooler = subprocess.Popen([str(program), "-q", "-u", "nobody", str(tmp_path / "ini")])
    try:
        pooled = url.set(host="127.0.0.1", port=port, query={})
        async with asyncio.timeout(30):
            while True:
                try:
                    with sa.create_engine(pooled, poolclass=sa.NullPool).connect():
                        break
                except OperationalError:
                    await asyncio.sleep(0.05)
        if mode == "transaction":
            with pytest.raises(StoreError, match="a pooler that shares sessions"):
                ownership.RecordsOwnership(sa.create_engine(pooled), "the records")
        else:
            ownership.RecordsOwnership(sa.create_engine(pooled), "the records").release()
    finally:
        pooler.terminate()
        pooler.wait()
