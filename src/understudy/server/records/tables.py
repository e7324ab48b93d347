"""The tables of the records: portable types only, so that SQLite and PostgreSQL hold the same.

Tokens are little-endian int32 blobs, logprobs float32 blobs with NaN for a missing one, everything nested is JSON text.
"""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    insert,
    inspect,
    select,
    text,
)

from ...errors import StoreError

SCHEMA = 1

metadata = MetaData()

meta = Table("meta", metadata, Column("key", String(64), primary_key=True), Column("value", Text, nullable=False))

calls = Table(
    "calls",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("trajectory_id", String(200), nullable=False),
    Column("idempotency_key", String(300)),
    Column("model", String(200), nullable=False),
    Column("step", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("late", Boolean, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("body", Text, nullable=False),  # sampling, constrained, messages, tools, origin, error, parse_failures
    UniqueConstraint("trajectory_id", "idempotency_key", name="calls_idempotency"),  # finds those of a trajectory too
)

_CLAIMED = text("claimed_by IS NOT NULL")
outputs = Table(
    "outputs",
    metadata,
    Column("call_id", String(200), primary_key=True),
    Column("choice", Integer, primary_key=True),
    Column("claimed_by", String(200)),  # the finished trajectory that this choice belongs to
    Column("status", String(16), nullable=False),
    Column("finish_reason", String(64)),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("message", Text, nullable=False),
    Index("outputs_claimed", "claimed_by", sqlite_where=_CLAIMED, postgresql_where=_CLAIMED),
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("model", String(200), nullable=False),
    Column("explicit", Boolean, nullable=False),  # it named its calls; else every call under its id is its own
    Column("reward", Double),
    Column("ended_at", Double, nullable=False),
    Column("body", Text, nullable=False),  # the TrajectoryRecord
    Index("trajectories_model", "model", "ended_at"),
)

trains = Table(
    "trains",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("model", String(200), nullable=False),
    Column("state", String(16), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("status", Text, nullable=False),
    Column("request", Text, nullable=False),
)

logs = Table(
    "logs",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("model", String(200), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("body", Text, nullable=False),
    Index("logs_model", "model"),
)


def prepare(connection: Connection, where: str) -> None:
    """Make the tables, or check that they are ours. Raises StoreError for records of a newer schema."""
    if inspect(connection).has_table("meta"):
        found = connection.execute(select(meta.c.value).where(meta.c.key == "schema")).scalar()
        if found is None or int(found) > SCHEMA:
            raise StoreError(
                f"the records at {where} have schema {found!r}, and this version of understudy knows up to {SCHEMA}: "
                "upgrade understudy, or keep records elsewhere (--dir or --store-url)"
            )
        return
    metadata.create_all(connection)
    connection.execute(insert(meta).values(key="schema", value=str(SCHEMA)))
