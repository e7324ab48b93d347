"""Allows one server per set of records in PostgreSQL: two would number and settle each other's records.

A session-level advisory lock on a connection of its own refuses a second server at its start. PostgreSQL releases it when the
server or its machine dies. A token in the records fences a server that lost the lock without knowing: each of its
transactions reads the token, so no transaction commits after another server has begun.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from contextlib import suppress

from sqlalchemy import Connection, Engine, create_engine, delete, insert, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from offbook.base.errors import StoreError

from .tables import meta

logger = logging.getLogger(__name__)

OWNER = "owner"
"""Row of `meta` with the token of the server that the records belong to."""
CHECK_SECONDS = 5.0
"""Interval at which the lock's connection is checked. A lost one is opened again."""
WAIT_SECONDS = 3.0
"""How long a start waits for the lock: PostgreSQL needs a moment to notice that a killed server is gone."""
_ROUNDS = 4
"""How often two connections are compared to find a pooler that gives both the same session."""
_SESSION = {
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "idle_session_timeout": "0",
}
"""Settings of the lock's session: a machine that is gone loses the lock within a minute, an idle session keeps it."""
_KEY = "hashtextextended('offbook records ' || current_schema(), 0)"
_HOLDER = f"""
    SELECT a.pid, a.client_addr, a.backend_start FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.objsubid = 1 AND (l.classid::bigint << 32 | l.objid::bigint) = {_KEY}
"""


class RecordsOwnership:
    """The lock and the token of one server. `where` names the records in messages."""

    def __init__(self, engine: Engine, where: str) -> None:
        """Take the lock. Raises StoreError if another server has it or a pooler shares sessions, and SQLAlchemyError."""
        self._engine = create_engine(engine.url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self._where = where
        self._token = uuid.uuid4().hex
        self._ended = threading.Event()
        self._connection = self._locked(WAIT_SECONDS)
        self._watch = threading.Thread(target=self._keep, name="offbook-records-lock", daemon=True)

    def begin(self, engine: Engine) -> None:
        """Write the token once no transaction of an earlier owner runs, and keep the lock from now on. Raises SQLAlchemyError."""
        with engine.begin() as connection:
            connection.execute(delete(meta).where(meta.c.key == OWNER))
            connection.execute(insert(meta).values(key=OWNER, value=self._token))
        self._watch.start()

    def check(self, connection: Connection) -> None:
        """Hold the records for this transaction. Raises StoreError if they belong to another server by now."""
        token = connection.scalar(select(meta.c.value).where(meta.c.key == OWNER).with_for_update(read=True))
        if token != self._token:
            raise StoreError(
                f"another server now owns the records at {self._where}: this server lost the connection that held its "
                "lock, and the other one has started since. Nothing more is recorded here: stop this server"
            )

    def release(self) -> None:
        """Give the lock back."""
        self._ended.set()
        if self._watch.ident is not None:
            self._watch.join()
        with suppress(SQLAlchemyError):  # a connection that is lost has released it already
            self._connection.close()

    def _locked(self, seconds: float) -> Connection:
        """A new connection that holds the lock."""
        connection = self._engine.connect()
        try:
            self._refuse_shared_sessions(connection)
            for name, value in _SESSION.items():
                known = text("SELECT set_config(name, :value, false) FROM pg_settings WHERE name = :name")
                connection.execute(known, {"name": name, "value": value})
            deadline = time.monotonic() + seconds
            while not connection.scalar(text(f"SELECT pg_try_advisory_lock({_KEY})")):
                if time.monotonic() > deadline:
                    raise StoreError(self._taken(connection))
                time.sleep(0.1)
        except BaseException:
            connection.close()
            raise
        return connection

    def _refuse_shared_sessions(self, connection: Connection) -> None:
        """Raise StoreError if a pooler gives the sessions of idle connections to others, as PgBouncer's transaction mode does.

        It would keep the lock with a session that is not this server's.
        """
        pid = text("SELECT pg_backend_pid()")
        with self._engine.connect() as other:
            own: set[int | None] = set()
            others: set[int | None] = set()
            for _ in range(_ROUNDS):
                own.add(connection.scalar(pid))
                others.add(other.scalar(pid))
        if len(own) > 1 or own & others:
            raise StoreError(
                f"the records at {self._where} are behind a pooler that shares sessions (PgBouncer in transaction mode?), which "
                "cannot hold the lock that keeps a second server off: connect to PostgreSQL itself, or use pool_mode = session"
            )

    def _taken(self, connection: Connection) -> str:
        holder = connection.execute(text(_HOLDER)).first()
        who = "unknown"
        if holder is not None:
            who = f"PostgreSQL's process {holder.pid}, connected from {holder.client_addr or 'its own machine'} at {holder.backend_start:%F %T %Z}"
        return (
            f"another server has the records at {self._where} ({who}). Use that server, stop it, or start this one with another "
            "--store-url"
        )

    def _keep(self) -> None:
        """Check the lock's connection until `release`. Take the lock again if it was lost."""
        while not self._ended.wait(CHECK_SECONDS):
            try:
                self._connection.execute(text("SELECT 1"))
                continue
            except SQLAlchemyError as error:
                logger.warning("The connection that holds the lock on %s is lost: %s", self._where, error)
            with suppress(SQLAlchemyError):  # it is lost already
                self._connection.close()
            try:
                self._connection = self._locked(0.0)
            except StoreError as error:
                logger.error("%s", error)
            except SQLAlchemyError as error:
                logger.warning("The lock on %s cannot be taken again yet: %s", self._where, error)
