"""The commands `offbook audit` and `offbook forget`: which traffic trained which step, and the removal of a user's traffic."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Annotated

import typer
from pydantic import ValidationError

from offbook.base.config import describe
from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.wire import name_at
from offbook.client.connection.http import Api
from offbook.commands.directory import server_needed
from offbook.commands.options import Dir, Server

from .audits import AuditRequest, StepAudit, TrajectoryAudit
from .client import audit_step, audit_trajectories, remove_trajectories

Threads = Annotated[list[str] | None, typer.Option("--thread", help="the app's own name of a thread; repeatable")]
Trajectories = Annotated[
    list[str] | None, typer.Option("--trajectory", help="id of a trajectory, such as thread-...; repeatable")
]
Route = Annotated[str | None, typer.Option(help="route of the threads  [default: the server's]")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def audit(
    step: Annotated[
        str | None, typer.Argument(help="a step of a model, such as agent@3", metavar="[MODEL@STEP]")
    ] = None,
    thread: Threads = None,
    trajectory: Trajectories = None,
    route: Route = None,
    url: Server = None,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Show what trained a step, or which steps a thread trained.

    \b
    Examples:
      offbook audit agent@3
      offbook audit --thread t-1
    """
    if (step is None) == (not (thread or trajectory)):
        raise ConfigError("name a step, such as agent@3, or pass --thread or --trajectory")
    if step is not None:
        shown = asyncio.run(_step_audit(server_needed(url, dir), step))
        echo(shown.model_dump_json(indent=1, ensure_ascii=True) if json else "\n".join(step_lines(shown)))
        return
    audits = asyncio.run(audit_trajectories(server_needed(url, dir), _request(thread, trajectory, route)))
    for one in audits:
        echo(one.model_dump_json(ensure_ascii=True) if json else "\n".join(trajectory_lines(one)))


def forget(
    thread: Threads = None,
    trajectory: Trajectories = None,
    route: Route = None,
    url: Server = None,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Delete a user's threads, and list the steps that were trained on them.

    What was made from the threads is deleted too. Trained steps stay. Copies outside the server's directory also stay:
    backups, exported files and trace services.

    \b
    Example:
      offbook forget --thread t-1
    """
    if not (thread or trajectory):
        raise ConfigError("name what to delete: --thread or --trajectory")
    removal = asyncio.run(remove_trajectories(server_needed(url, dir), _request(thread, trajectory, route)))
    if json:
        echo(removal.model_dump_json(indent=1, ensure_ascii=True))
        return
    echo(
        f"deleted: {counted(removal.records, 'rollout')} with {counted(removal.calls, 'sampled call')}, and their parts of "
        f"{counted(removal.files, 'file')}"
    )
    if not removal.erased:
        echo(
            "the database may still hold parts of them until it is compacted: stop its readers and run the command again"
        )
    for one in removal.trajectories:
        echo("\n".join(trajectory_lines(one)))


def step_lines(audit: StepAudit) -> list[str]:
    """What trained a step, for a person."""
    name = name_at(audit.model, audit.step)
    calls = sum(len(one.calls) for one in audit.trajectories)
    lines = [f"{name}: {counted(len(audit.trajectories), 'rollout')} with {counted(calls, 'call')}"]
    lines += [f"  train request {audit.request_id}"] if audit.request_id is not None else []
    for one in audit.trajectories:
        thread = f" (thread {one.thread_id})" if one.thread_id is not None else ""
        lines.append(f"  {one.id}{thread}: {', '.join(one.calls) if one.recorded else 'deleted since'}")
    if audit.after:
        lines.append(f"  continues from {', '.join(spans(audit.after))}")
    if audit.unrecorded:
        lines.append(f"  not in the records: what trained {', '.join(spans(audit.unrecorded))}")
    return lines


def trajectory_lines(audit: TrajectoryAudit) -> list[str]:
    """What a trajectory trained, for a person."""
    rest = f", {counted(len(audit.derived), 'rollout')} made from it" if audit.derived else ""
    lines = [f"{audit.id}: {'recorded' if audit.recorded else 'not recorded'}{rest}"]
    if not audit.trained:
        return [*lines, "  trained no step"]
    since = ", ".join(f"{name_at(model, step)} and later" for model, step in audit.seen_since.items())
    return [*lines, f"  trained {', '.join(audit.trained)}", f"  in what was learned by {since}"]


def spans(names: Sequence[str]) -> list[str]:
    """Steps with those that follow downwards in one text.

    >>> spans(["fork@5", "fork@4", "agent@4", "agent@3", "agent@2"])
    ['fork@5 to 4', 'agent@4 to 2']
    """
    ends: list[tuple[str, int, int]] = []
    for name in names:
        model, _, number = name.rpartition("@")
        if ends and ends[-1][0] == model and ends[-1][2] == int(number) + 1:
            ends[-1] = (model, ends[-1][1], int(number))
        else:
            ends.append((model, int(number), int(number)))
    return [name_at(model, first) + (f" to {last}" if last != first else "") for model, first, last in ends]


async def _step_audit(api: Api, step: str) -> StepAudit:
    named = re.fullmatch(r"(?P<model>[^@]+)(?:@(?P<step>\d{1,10}))?", step)
    if named is None:
        raise ConfigError(f"step: a model and a step such as agent@3 are needed, got {step!r}")
    number = int(named["step"]) if named["step"] else (await api.model(named["model"])).step
    return await audit_step(api, named["model"], number)


def _request(threads: Sequence[str] | None, trajectories: Sequence[str] | None, route: str | None) -> AuditRequest:
    try:
        return AuditRequest(trajectory_ids=tuple(trajectories or ()), thread_ids=tuple(threads or ()), route=route)
    except ValidationError as error:
        raise ConfigError(describe(error, "audit")) from error
