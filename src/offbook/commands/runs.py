"""The commands `offbook runs` and `offbook show`: the runs of a directory, the steps of a run, or a rollout."""

from __future__ import annotations

import asyncio
import json as json_format
import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from offbook.base.console import Terminal, fitting, measured
from offbook.base.errors import ConfigError
from offbook.base.server_options import server_folder
from offbook.base.text import counted, printable
from offbook.base.types import Call, Json, Message
from offbook.base.wire import TrajectoryWithCalls
from offbook.server.records.database import open_records
from offbook.server.records.overview import RolloutRow
from offbook.server.views.numbers import DASH, ago, fixed, moment, number, percent, seconds
from offbook.server.views.run_source import RunOverview, RunSource
from offbook.server.views.run_summary import (
    EvaluationLine,
    RunLine,
    evaluation_lines,
    facts_of,
    lines_of,
    run_name,
    step_table,
    warnings_of,
)

from .options import Dir

_RUNS = 30
"""Runs that `runs` lists at most."""
_NUMBERS = ("step", "reward", "trend", "evaluation", "rollouts")
_COLUMNS = ("run", "status", "model", "started", *_NUMBERS)
_GIVE_WAY = ("trend", "rollouts", "started", "evaluation")
"""Columns of `runs` that are left out in a narrow terminal, the first one first."""
_STEPS_GIVE_WAY = ("tree saves", "trained tokens", "clipped", "kl", "seconds", "spread")
_EVALUATIONS_GIVE_WAY = ("failed", "rollouts", "split")
"""The same for the tables of `show`."""
_NARROW_MODEL = 14
_STEPS = 20
"""Steps that `show` lists at most."""


def runs(
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    dir: Dir = None,
) -> None:
    """List recorded runs, without a running server."""
    with opened(dir) as source:
        asyncio.run(_runs(source, Terminal(highlight=False), as_json=json))


def show_records(
    name: Annotated[str, typer.Argument(help="name of a run, or id of a trajectory")],
    dir: Dir = None,
) -> None:
    """Show the steps of a run, or the conversation of a trajectory."""
    with opened(dir) as source:
        asyncio.run(_show(source, Terminal(highlight=False), name))


@contextmanager
def opened(folder: Path | None) -> Generator[RunSource]:
    """The records of a directory. Raises ConfigError for a folder without any, StoreError."""
    place = server_folder(folder)
    records = open_records(place, briefly=True)
    try:
        yield RunSource(records, place)
    finally:
        records.close()


async def _runs(source: RunSource, console: Console, *, as_json: bool) -> None:
    listed = await source.runs()
    lines = await lines_of(listed[:_RUNS], source)
    if as_json:
        console.print_json(json_format.dumps([asdict(line) for line in lines]), ensure_ascii=True)
        return
    if not lines:
        console.print(f"No rollout has finished in {source.folder} yet.", markup=False)
        return
    table, width = _runs_table(lines, console)
    console.width = width
    console.print(table)
    if len(listed) > _RUNS:
        older = counted(len(listed) - _RUNS, "older run")
        console.print(f"and {older}", style="dim")


def _runs_table(lines: Sequence[RunLine], console: Console) -> tuple[Table, int]:
    """The table and its width. A run's id stays on one line: other columns give way, then models fold, then the console's
    width does."""

    def of(columns: Sequence[str], model_width: int | None = None) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            right, width = name in _NUMBERS, model_width if name == "model" else None
            table.add_column(
                name, justify="right" if right else "left", no_wrap=name != "model", max_width=width, overflow="fold"
            )
        for line in lines:
            _add_row(table, line, columns)
        return table

    table = fitting(of, _COLUMNS, _GIVE_WAY, console)
    if measured(table, console).maximum > console.width:
        table = of([name for name in _COLUMNS if name not in _GIVE_WAY], _NARROW_MODEL)
    return table, max(measured(table, console).minimum, console.width)


def _add_row(table: Table, line: RunLine, columns: Sequence[str]) -> None:
    cells: dict[str, str | Text] = {
        "run": Text(printable(run_name(line.run))),
        "status": f"{line.status.mark} {line.status.text}",
        "model": Text(printable(line.models)),
        "started": ago(line.began),
        "step": number(line.step),
        "reward": fixed(line.reward, 3) if line.loss is None else f"loss {fixed(line.loss, 3)}",
        "trend": line.change,
        "evaluation": f"{line.measure.replace('cross-entropy', 'loss')} {fixed(line.evaluation, 3)}".lstrip(),
        "rollouts": number(line.rollouts),
    }
    table.add_row(*(cells[name] for name in columns))


async def _show(source: RunSource, console: Console, name: str) -> None:
    run = await source.run(name)
    if run is not None:
        console.print(_run(run, await evaluation_lines(run, source), console))
        console.print(_rollouts(await source.rollouts(run.run, run.last.step)))
        return
    trajectory = await source.trajectory(name)
    if trajectory is None:
        raise ConfigError(
            f"there is no run and no trajectory {name!r} in {source.folder}; `offbook runs` lists the runs"
        )
    console.print(_trajectory(name, trajectory))


def _run(run: RunOverview, evaluations: Sequence[EvaluationLine], console: Console) -> Group:
    """A run's facts, warnings, newest steps and evaluations."""
    facts = Table.grid(padding=(0, 3))
    for fact in facts_of(run):
        facts.add_row(Text(fact.name, "dim"), Text(fact.value, "bold"), Text(fact.note, "dim"))
    warnings = [
        Text(
            f"! step {number(warning.step)}: {warning.text}"
            + (f" ({warning.times} times)" if warning.times > 1 else ""),
            "yellow",
        )
        for warning in warnings_of(run)
    ]
    head = Text(f"{run_name(run.run)}: {', '.join(run.models)}, {counted(run.row.rollouts, 'rollout')}", "bold")
    began = Text(f"began {moment(run.first.started_at)}, last rollout {ago(run.last.ended_at)}", "dim")
    tables: list[RenderableType] = [Text(), _steps(run, console)] if run.updates else []
    if evaluations:
        tables += [Text(), _evaluations(evaluations[:_STEPS], console)]
    return Group(head, began, *warnings, Text(), facts, *(tables or [Text("\nNothing was trained.")]))


def _steps(run: RunOverview, console: Console) -> Table:
    """The newest steps. In a narrow terminal columns give way."""
    headings, lines = step_table(run)
    shown = [heading.lower() for heading in headings]
    rows = [(line, dict(zip(shown, line.cells, strict=True))) for line in lines[:_STEPS]]

    def of(columns: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("step", *columns):
            table.add_column(name, justify="left" if name == "step" else "right", no_wrap=True)
        table.add_column("")
        for line, cells in rows:
            table.add_row(line.step, *(cells[name] for name in columns), line.state)
        return table

    return fitting(of, shown, _STEPS_GIVE_WAY, console)


def _rollouts(rows: Sequence[RolloutRow]) -> Group:
    """The worst two and the best rollout of the last step, by names that `show` takes."""
    ordered = sorted(rows, key=lambda row: -math.inf if row.reward is None else row.reward)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rollout", no_wrap=True, overflow="fold")
    table.add_column("reward", justify="right", no_wrap=True)
    table.add_column("scenario")
    for row in [*ordered[:2], *ordered[2:][-1:]]:
        table.add_row(row.id, "failed" if row.failed else fixed(row.reward, 3), Text(printable(row.scenario or DASH)))
    of_all = (
        f"\nThe worst and the best of {counted(len(rows), 'rollout')} of the last step, for `offbook show ROLLOUT`:"
    )
    return Group(Text(of_all, "dim"), table)


def _evaluations(lines: Sequence[EvaluationLine], console: Console) -> Table:
    """The newest evaluations, without the columns that say nothing. In a narrow terminal others give way."""
    rows = [
        {
            "evaluated step": number(line.step),
            "split": printable(line.split or DASH),
            "cross-entropy": fixed(line.loss, 3),
            "success": percent(line.success),
            "reward": fixed(line.reward, 3),
            "rollouts": number(line.rollouts),
            "failed": number(line.failed),
        }
        for line in lines
    ]

    def of(columns: Sequence[str]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            left = name in ("evaluated step", "split")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for row in rows:
            table.add_row(*(Text(row[name]) for name in columns))
        return table

    known = [name for name in rows[0] if any(row[name] != DASH for row in rows)]
    return fitting(of, known, _EVALUATIONS_GIVE_WAY, console)


def _trajectory(name: str, trajectory: TrajectoryWithCalls) -> Group:
    """A trajectory's place, reward, metrics and logs, and its calls."""
    record = trajectory.trajectory
    parts: list[RenderableType] = [Text(name, "bold")]
    if record is None:
        parts.append(Text("not finished yet", "yellow"))
    else:
        place = record.place
        fields = {"run": place.run, "step": place.step, "split": place.split, "scenario": place.scenario}
        known = [f"{key} {value}" for key, value in fields.items() if value is not None]
        took = seconds(max(record.ended_at - record.started_at, 0.0))
        parts.append(Text(", ".join([*known, f"model {record.model}", f"took {took}"]), "dim"))
        parts.append(Text(f"reward {fixed(record.reward, 3)}", "bold"))
        parts += [Text(f"  {key} {number(value)}") for key, value in record.metrics.items()]
        parts += [Text(f"  log: {printable(line)}") for line in record.logs]
        if record.exception is not None:
            error = record.exception
            cause = Text(printable(error.traceback or error.message))
            parts.append(Panel(cause, title=Text(printable(error.type)), border_style="red"))
    calls = trajectory.all_calls()
    for position, call in enumerate(calls, start=1):
        parts += _call(position, call, calls[position - 2] if position > 1 else None)
    return Group(*parts)


def _call(position: int, call: Call, previous: Call | None) -> Iterator[RenderableType]:
    """A call: its messages beyond those of the previous call, and its answers."""
    known = len(previous.messages) if previous is not None else 0
    shared = previous is not None and call.messages[:known] == previous.messages
    fresh = call.messages[known:] if shared else call.messages
    if shared and fresh and fresh[0].get("role") == "assistant":
        fresh = fresh[1:]  # the answer of the previous call, which is shown there
    tokens = sum(len(output.token_ids) for output in call.outputs)
    took = seconds(max(call.ended_at - call.started_at, 0.0))
    place = call.origin and (call.origin.agent or call.origin.node)
    yield Text(
        f"\ncall {position}{f' of {place}' if place else ''}: {call.model} at step {call.step}, {tokens} tokens, {took}, {call.status}",
        "bold cyan",
    )
    for message in fresh:
        yield _message(message, "dim")
    for output in call.outputs:
        yield _message(output.message, "")
    if call.error:
        yield Text(printable(call.error), "red")


def _message(message: Message, style: str) -> Text:
    """A message and its tool calls as text, with control characters escaped."""
    content: Json = message.get("content")
    lines = [content if isinstance(content, str) else json_format.dumps(content, ensure_ascii=False)] if content else []
    for tool in message.get("tool_calls") or ():
        function: dict[str, Json] = tool.get("function") or {}
        lines.append(f"{function.get('name')}({function.get('arguments')})")
    return Text(f"{message.get('role', '?')}: ", "bold").append(printable("\n".join(lines)), style or "not bold")
