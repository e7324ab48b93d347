"""The command `offbook usage`: calls, tokens and latency per app, model and day from the server's records."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from json import dumps
from typing import Annotated

import typer

from offbook.base.terminal import echo
from offbook.base.types import CallStatus
from offbook.base.wire import RolloutTrace, TrajectoryQuery
from offbook.client.connection.http import Api
from offbook.tracing.rollout_reader import PAGE, pages

from .directory import records_at
from .options import Dir, Server

DAY = 86_400.0
UNKNOWN = "-"


def usage(
    model: Annotated[str | None, typer.Option(help="only this model")] = None,
    run: Annotated[str | None, typer.Option(help="only this run")] = None,
    days: Annotated[float | None, typer.Option(min=0, help="only the last DAYS days")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    url: Server = None,
    dir: Dir = None,
) -> None:
    """Show calls, tokens and latency per app, model and day.

    Latency is the median (p50) and the 95th percentile (p95), in seconds.

    \b
    Example:
      offbook usage --days 7
    """
    query = TrajectoryQuery(model=model, run=run, limit=PAGE)
    records = records_at(url, dir)
    rollouts = pages(records, query) if isinstance(records, Api) else records.rollouts(query)
    since = 0.0 if days is None else time.time() - days * DAY
    rows = asyncio.run(usage_rows(rollouts, since))
    echo(dumps(as_json(rows), indent=1) if json else "\n".join(table(rows)))


@dataclass
class UsageRow:
    """The usage of one app, model and day. Latencies are in seconds, of successful calls."""

    app: str
    model: str
    day: str
    calls: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    latencies: list[float] = field(default_factory=list[float], repr=False)

    def quantile(self, share: float) -> float:
        """The nearest-rank quantile of the latencies, for a share from 0 to 1; NaN without any."""
        ordered = sorted(self.latencies)
        return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else math.nan


async def usage_rows(rollouts: AsyncIterable[RolloutTrace], since: float = 0.0) -> list[UsageRow]:
    """Sum up the calls since `since` (Unix seconds), by day (UTC), app and model.

    The app is the rollout's `metadata["app"]`, else the agent's name, else the split.
    """
    rows: dict[tuple[str, str, str], UsageRow] = {}
    seen: set[str] = set()
    async for rollout in rollouts:
        for call in rollout.calls:
            if call.started_at < since or call.id in seen:
                continue
            seen.add(call.id)
            agent = call.origin.agent if call.origin is not None else None
            app = str(rollout.record.metadata.get("app") or agent or rollout.record.place.split or UNKNOWN)
            day = datetime.fromtimestamp(call.started_at, UTC).date().isoformat()
            row = rows.setdefault((day, app, call.model), UsageRow(app, call.model, day))
            row.calls += 1
            row.input_tokens += call.prompt_tokens
            row.output_tokens += sum(output.tokens for output in call.outputs)
            if call.status in (CallStatus.COMPLETE, CallStatus.TRUNCATED):
                row.latencies.append(
                    max(call.ended_at - call.started_at, 0.0)
                )  # below 0: the clock was set back meanwhile
            else:
                row.failed += 1
    return [rows[key] for key in sorted(rows)]


def as_json(rows: Sequence[UsageRow]) -> list[dict[str, object]]:
    """The rows as JSON objects; NaN as null."""
    return [
        {
            "app": row.app,
            "model": row.model,
            "day": row.day,
            "calls": row.calls,
            "failed": row.failed,
            "input_tokens": row.input_tokens,
            "output_tokens": row.output_tokens,
            "p50_seconds": row.quantile(0.5) if row.latencies else None,
            "p95_seconds": row.quantile(0.95) if row.latencies else None,
        }
        for row in rows
    ]


def table(rows: Sequence[UsageRow]) -> list[str]:
    """The rows as text lines for a terminal."""
    wide = max((len(row.app) for row in rows), default=3), max((len(row.model) for row in rows), default=5)
    head = f"{'day':10}  {'app':{wide[0]}}  {'model':{wide[1]}}  {'calls':>7}  {'failed':>6}  {'in':>10}  {'out':>10}  {'p50 s':>7}  {'p95 s':>7}"
    lines = [head]
    for row in rows:
        lines.append(
            f"{row.day:10}  {row.app:{wide[0]}}  {row.model:{wide[1]}}  {row.calls:7}  {row.failed:6}  {row.input_tokens:10}  "
            f"{row.output_tokens:10}  {row.quantile(0.5):7.2f}  {row.quantile(0.95):7.2f}"
        )
    return lines
