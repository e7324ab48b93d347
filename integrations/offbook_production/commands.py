"""Move an app's calls from a paid model to yours, if its scores show that yours is good enough."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from offbook.base.config import describe
from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.base.wire import name_at
from offbook.commands.directory import server_needed
from offbook.commands.generated_options import with_options
from offbook.commands.options import Dir, Server

from .wire import AuditRequest, Numbers, Removal, TakeoverRule, TakeoverState, TrajectoryAudit

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
FORGET_SECONDS = 3600.0
"""How long a removal may take, with large records."""
Threads = Annotated[list[str] | None, typer.Option("--thread", help="the app's own name of a thread; repeatable")]
Trajectories = Annotated[
    list[str] | None, typer.Option("--trajectory", help="id of a trajectory, such as thread-...; repeatable")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Route = Annotated[str | None, typer.Option(help="the app's route  [default: the server's --route]")]


@app.command()
@with_options(TakeoverRule)
def start(url: Server = None, dir: Dir = None, options: dict[str, Any] = {}) -> None:  # noqa: B006  # the decorator passes it
    """Let your model answer a share of threads, then all of them or none."""
    try:
        rule = TakeoverRule.model_validate(options)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = f"--{str(fault['loc'][0]).replace('_', '-')}: " if fault["loc"] else ""
        raise ConfigError(f"{name}{fault['msg'].removeprefix('Value error, ')}") from error
    _show(_takeover(url, dir, "POST", "/start", rule))


@app.command()
def status(url: Server = None, dir: Dir = None, json: Json = False) -> None:
    """Show the numbers, and every decision."""
    state = _takeover(url, dir, "GET", "")
    if json:
        echo(state.model_dump_json(indent=1, ensure_ascii=True))
    else:
        _show(state)


@app.command()
def stop(url: Server = None, dir: Dir = None) -> None:
    """Give all calls to the paid model again, at once."""
    _show(_takeover(url, dir, "POST", "/stop"))


def _takeover(
    url: Any, dir: Any, method: Literal["GET", "POST"], action: str, rule: TakeoverRule | None = None
) -> TakeoverState:
    api = server_needed(url, dir, "offbook serve --upstream ...")
    return asyncio.run(api.ask(TakeoverState, method, f"/api/takeover{action}", rule, repeat=method == "GET"))


def _show(state: TakeoverState) -> None:
    echo(f"{state.route}: {state.status}" + (f", {state.model}" if state.model else ""))
    if state.active:
        echo(f"  {100 * state.share:g} % of new threads: {_numbers(state.numbers)}")
    for decision in state.decisions:
        time = datetime.fromtimestamp(decision.decided_at).strftime("%Y-%m-%d %H:%M")
        numbers = "" if decision.verdict == "started" else f" ({_numbers(decision.numbers)})"
        echo(f"  {time}  {decision.model}  {decision.verdict}: {decision.reason}{numbers}")


def _numbers(numbers: Numbers) -> str:
    parts = [f"{numbers.small} against {numbers.paid} scores"]
    if numbers.small_score is not None and numbers.paid_score is not None:
        parts.append(f"mean {numbers.small_score:.3f} against {numbers.paid_score:.3f}")
    if numbers.lower is not None and numbers.upper is not None:
        parts.append(f"95 % interval {numbers.lower:+.3f} to {numbers.upper:+.3f}")
    parts.append(f"{numbers.calls} calls, {sum(numbers.failed.values())} failed")
    return ", ".join(parts)


def audit(
    thread: Threads = None,
    trajectory: Trajectories = None,
    route: Route = None,
    url: Server = None,
    dir: Dir = None,
    json: Json = False,
) -> None:
    """Show which steps a thread trained.

    \b
    Example:
      offbook audit --thread t-1
    """
    request = _request(thread, trajectory, route)
    answer = server_needed(url, dir).ask(list[TrajectoryAudit], "POST", "/api/audit", request)
    for one in asyncio.run(answer):
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
    request = _request(thread, trajectory, route)
    answer = server_needed(url, dir).ask(Removal, "POST", "/api/audit/removal", request, timeout=FORGET_SECONDS)
    removal = asyncio.run(answer)
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


def trajectory_lines(audit: TrajectoryAudit) -> list[str]:
    """What a trajectory trained, for a person."""
    rest = f", {counted(len(audit.derived), 'rollout')} made from it" if audit.derived else ""
    lines = [f"{audit.id}: {'recorded' if audit.recorded else 'not recorded'}{rest}"]
    if not audit.trained:
        return [*lines, "  trained no step"]
    since = ", ".join(f"{name_at(model, step)} and later" for model, step in audit.seen_since.items())
    return [*lines, f"  trained {', '.join(audit.trained)}", f"  in what was learned by {since}"]


def _request(threads: Sequence[str] | None, trajectories: Sequence[str] | None, route: str | None) -> AuditRequest:
    if not (threads or trajectories):
        raise ConfigError("name threads or rollouts: --thread or --trajectory")
    try:
        return AuditRequest(trajectory_ids=tuple(trajectories or ()), thread_ids=tuple(threads or ()), route=route)
    except ValidationError as error:
        raise ConfigError(describe(error, "audit")) from error
