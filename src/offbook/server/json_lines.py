"""`python -m offbook.server traces|models`: the finished trajectories, or the models, of a directory as JSON lines, without
a running server."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ValidationError

from offbook.base.errors import ConfigError
from offbook.base.wire import ModelRecords, RolloutTrace, TrajectoryQuery

from .http.viewer import open_records
from .models.checkpoints import scan_models
from .records.call_reading import trace_page
from .records.overview import model_logs
from .records.read_only import Readable
from .stored_models import checkpoint_states


def run_json_lines(argv: Sequence[str]) -> int:
    """Print a RolloutTrace per line for all pages of a TrajectoryQuery, or a ModelRecords per line, and return the exit code.

    Raises ConfigError for a folder without records or a wrong query, and StoreError.
    """
    arguments = _parse(argv)
    try:
        query = TrajectoryQuery.model_validate_json(arguments.query)
    except ValidationError as error:
        raise ConfigError(f"--query: {arguments.query!r} is no TrajectoryQuery: {error}") from error
    records = open_records(arguments.dir)
    try:
        lines = _rollouts(records, query) if arguments.command == "traces" else _models(records, arguments.dir)
        asyncio.run(_print(lines))
    finally:
        records.close()
    return 0


async def _print(lines: AsyncIterator[BaseModel]) -> None:
    async for line in lines:
        print(line.model_dump_json())


async def _rollouts(records: Readable, query: TrajectoryQuery) -> AsyncIterator[RolloutTrace]:
    while True:
        page = await records.read(partial(trace_page, query=query))
        for rollout in page.rollouts:
            yield rollout
        if page.next is None:
            return
        query = query.model_copy(update={"after": page.next})


async def _models(records: Readable, folder: Path) -> AsyncIterator[ModelRecords]:
    for place, facts in scan_models(folder):
        logs = await records.read(partial(model_logs, model=facts.name))
        yield ModelRecords(name=facts.name, checkpoints=tuple(checkpoint_states(place)), logs=tuple(logs))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m offbook.server", allow_abbrev=False)
    parser.add_argument("command", choices=("traces", "models"))
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--query", default="{}", help="of traces: a TrajectoryQuery as JSON")
    return parser.parse_args(argv)
