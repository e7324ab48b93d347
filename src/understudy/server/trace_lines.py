"""`python -m understudy.server traces`: the finished trajectories of a directory as JSON lines, without a running server."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from ..errors import ConfigError
from ..wire import RolloutTrace, TrajectoryQuery
from .http.viewer import open_records
from .records.call_reading import trace_page
from .records.read_only import Readable


def run_traces(argv: Sequence[str]) -> int:
    """Print a RolloutTrace per line for all pages of a TrajectoryQuery, and return the exit code.

    Raises ConfigError for a folder without records or a wrong query, and StoreError.
    """
    arguments = _parse(argv)
    try:
        query = TrajectoryQuery.model_validate_json(arguments.query)
    except ValidationError as error:
        raise ConfigError(f"--query: {arguments.query!r} is no TrajectoryQuery: {error}") from error
    records = open_records(arguments.dir)
    try:
        asyncio.run(_print(records, query))
    finally:
        records.close()
    return 0


async def _print(records: Readable, query: TrajectoryQuery) -> None:
    async for rollout in _rollouts(records, query):
        print(rollout.model_dump_json())


async def _rollouts(records: Readable, query: TrajectoryQuery) -> AsyncIterator[RolloutTrace]:
    while True:
        page = await records.read(partial(trace_page, query=query))
        for rollout in page.rollouts:
            yield rollout
        if page.next is None:
            return
        query = query.model_copy(update={"after": page.next})


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m understudy.server", allow_abbrev=False)
    parser.add_argument("command", choices=("traces",))
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--query", default="{}", help="a TrajectoryQuery as JSON")
    return parser.parse_args(argv)
