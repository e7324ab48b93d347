"""The tables of the records, and the check of their schema.

Token ids are little-endian int32 blobs. Logprobs are float32 blobs with NaN for a missing one. Nested values are JSON text.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
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

from offbook.base.errors import StoreError

SCHEMA = 2

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
    Column("body", Text, nullable=False),  # sampling, messages, tools, origin, ...: see call_rows.call_row
    UniqueConstraint("trajectory_id", "idempotency_key", name="calls_idempotency"),  # also the index by trajectory
)

_CLAIMED = text("claimed_by IS NOT NULL")
outputs = Table(
    "outputs",
    metadata,
    Column("call_id", String(200), primary_key=True),
    Column("choice", Integer, primary_key=True),
    Column("claimed_by", String(200)),  # id of a finished trajectory
    Column("status", String(16), nullable=False),
    Column("finish_reason", String(64)),
    Column("token_ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    Column("message", Text, nullable=False),
    Index("outputs_claimed", "claimed_by", sqlite_where=_CLAIMED),
)

_UNSCORED = text("reward IS NULL")
trajectories = Table(
    "trajectories",
    metadata,
    Column("id", String(200), primary_key=True),
    Column("seq", BigInteger, nullable=False),  # 1, 2, ... in the order of first finishing
    Column("model", String(200), nullable=False),  # the model of the last finishing
    Column("explicit", Boolean, nullable=False),  # it lists its calls; otherwise all calls with its id are its own
    Column("reward", Double),
    Column("failed", Boolean, nullable=False),  # an exception ended it
    Column("ended_at", Double, nullable=False),
    Column("run", Text),  # run ... group_index: RolloutPlace; NULL if unknown
    Column("split", Text),
    Column("step", Integer),
    Column("scenario", Text),
    Column("group_id", Text),
    Column("group_index", Integer),
    Column("body", Text, nullable=False),  # JSON of TrajectoryRecord; last, so that scans of other columns skip it
    Index("trajectories_seq", "seq", unique=True),
    # The indexes of listing.DRIVING. Each returns rows in the order of lists.
    Index("trajectories_group", "group_id", "seq"),
    Index("trajectories_scenario", "scenario", "seq"),
    Index("trajectories_run_step", "run", "step", "seq"),
    Index("trajectories_run_split", "run", "split", "seq"),
    Index("trajectories_run", "run", "seq"),
    Index("trajectories_step", "step", "seq"),
    Index("trajectories_split", "split", "seq"),
    Index("trajectories_failed", "seq", sqlite_where=text("failed = 1")),
    Index("trajectories_unscored", "seq", sqlite_where=_UNSCORED),
)

trajectory_models = Table(
    "trajectory_models",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),  # of the trajectory
    Column("model", String(200), primary_key=True),  # a model that it called or was finished for
    Index("trajectory_models_model", "model", "seq"),
    sqlite_with_rowid=False,
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

expired = Table(
    "expired",
    metadata,
    Column("trajectory_id", String(200), primary_key=True),
    Column("calls", Integer, nullable=False),  # number of deleted calls that nothing claimed in time
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


def prepare(engine: Engine, file: Path) -> None:
    """Create the tables if there are none.

    Raises StoreError if the database has another schema, SQLAlchemyError if it does not respond.
    """
    with engine.begin() as connection:
        if inspect(connection).has_table("meta"):
            check_schema(connection, file)
        else:
            metadata.create_all(connection)
            connection.execute(insert(meta).values(key="schema", value=str(SCHEMA)))


def check_schema(connection: Connection, file: Path) -> None:
    """Raises StoreError if the records in `file` have another schema than this version's."""
    stored = connection.execute(select(meta.c.value).where(meta.c.key == "schema")).scalar()
    if stored == str(SCHEMA):
        return
    newer = stored is None or int(stored) > SCHEMA
    remedy = (
        "upgrade with `pip install --upgrade offbook`"
        if newer
        else "they were written before the first release: move them away (models and checkpoints stay usable)"
    )
    raise StoreError(
        f"the records at {file} have schema {stored!r}, but this version of offbook reads schema {SCHEMA}: {remedy}, "
        "or keep records elsewhere (--dir)"
    )
