"""Move an app's calls from a paid model to yours, in stages that its scores must pass."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from offbook.base.errors import ConfigError, OffbookError
from offbook.base.takeovers import SHADOW, Decision, Numbers, TakeoverPlan, TakeoverState, share_text
from offbook.base.terminal import echo
from offbook.base.text import counted
from offbook.client.connection.http import Api
from offbook.tracing.sink_registry import named_sinks, resolve_sinks
from offbook.tracing.takeover_events import TakeoverEvents

from .directory import server_needed
from .generated_options import with_options
from .options import Dir, Server

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
FOLLOW_SECONDS = 10.0
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Route = Annotated[
    str | None,
    typer.Option(help="app whose calls move, by its route  [default: that of --upstream, else the only one]"),
]


@app.command()
@with_options(TakeoverPlan)
def plan(url: Server = None, dir: Dir = None, route: Route = None, options: dict[str, Any] = {}) -> None:  # noqa: B006  # the decorator passes it
    """Show how many threads each stage needs. Nothing changes."""
    state = asyncio.run(_api(url, dir).takeover("plan", _plan(options), route))
    echo(f"{state.route}: {state.model} takes over at a margin of {state.plan.margin:g}")
    for needs in state.needs:
        what = "compared answers" if needs.share == SHADOW else "scored threads of the small model"
        traffic = "" if needs.share in (SHADOW, 1.0) else f", {needs.traffic:,} of all"
        echo(f"  {share_text(needs.share):>6}  usually {needs.usual:,}, at most {needs.most:,} {what}{traffic}")


@app.command()
@with_options(TakeoverPlan)
def start(url: Server = None, dir: Dir = None, route: Route = None, options: dict[str, Any] = {}) -> None:  # noqa: B006  # the decorator passes it
    """Begin a takeover: shadow first, then growing shares of threads."""
    _show(asyncio.run(_api(url, dir).takeover("start", _plan(options), route)))


@app.command()
def status(url: Server = None, dir: Dir = None, route: Route = None, json: Json = False) -> None:
    """Show the stage, its numbers, and every decision."""
    state = asyncio.run(_api(url, dir).takeover_state(route))
    if json:
        echo(state.model_dump_json(indent=1, ensure_ascii=True))
    else:
        _show(state)


@app.command()
def approve(url: Server = None, dir: Dir = None, route: Route = None) -> None:
    """Let a takeover that was started with --approve go on to its next stage."""
    _show(asyncio.run(_api(url, dir).takeover("approve", route=route)))


@app.command()
def stop(url: Server = None, dir: Dir = None, route: Route = None) -> None:
    """Give all calls to the paid model again, at once."""
    _show(asyncio.run(_api(url, dir).takeover("stop", route=route)))


@app.command()
def export(
    to: Annotated[str, typer.Option(help="tools to send the decisions to, comma-separated, such as langfuse,wandb")],
    url: Server = None,
    dir: Dir = None,
    route: Route = None,
    follow: Annotated[bool, typer.Option("--follow", help="also send new decisions, until Ctrl-C")] = False,
) -> None:
    """Send every decision to Langfuse, W&B or another tool.

    A tool that has a decision already keeps one copy."""
    api, events = _api(url, dir), TakeoverEvents(resolve_sinks(named_sinks(to, "--to")))
    events.check()
    try:
        while True:
            try:
                state = asyncio.run(api.takeover_state(route))
                if number := events.show(state):
                    echo(f"{state.route}: {counted(number, 'decision')} to {to}")
            except OffbookError as error:
                if not follow:
                    raise
                echo(f"offbook: {error}", err=True)  # asked and sent again
            if not follow:
                return
            time.sleep(FOLLOW_SECONDS)
    finally:
        events.close()


def _api(url: str | None, dir: Path | None) -> Api:
    return server_needed(url, dir, "offbook serve --upstream ...")


def _plan(options: dict[str, Any]) -> TakeoverPlan:
    try:
        return TakeoverPlan.model_validate(options)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = f"--{str(fault['loc'][0]).replace('_', '-')}: " if fault["loc"] else ""
        raise ConfigError(f"{name}{fault['msg'].removeprefix('Value error, ')}") from error


def _show(state: TakeoverState) -> None:
    echo(f"{state.route}: {state.status}" + (f", {state.model}" if state.model else ""))
    if state.status in ("running", "waiting", "taken_over"):
        echo(f"  {share_text(state.share)}: {_numbers(state.numbers)}")
    for decision in state.decisions:
        echo(_line(decision))


def _line(decision: Decision) -> str:
    time = datetime.fromtimestamp(decision.decided_at).strftime("%Y-%m-%d %H:%M")
    numbers = "" if decision.verdict in ("started", "approved") else f" ({_numbers(decision.numbers)})"
    return f"  {time}  {share_text(decision.share):>6}  {decision.verdict}: {decision.reason}{numbers}"


def _numbers(numbers: Numbers) -> str:
    parts = [f"{numbers.tested} against {numbers.reference}" if numbers.reference else f"{numbers.tested}"]
    if numbers.score is not None:
        against = "" if numbers.reference_score is None else f" against {numbers.reference_score:.3f}"
        parts.append(f"mean {numbers.score:.3f}{against}")
    if numbers.lower is not None and numbers.upper is not None:
        parts.append(f"interval {numbers.lower:+.3f} to {numbers.upper:+.3f}")
    failed = sum(numbers.failed.values())
    return ", ".join(
        [
            *parts,
            f"{numbers.calls} calls, {failed} failed, {numbers.slow} slow, {numbers.unknown} unknown",
            f"{numbers.tool_errors} of {numbers.results} tool results failed",
            *([f"{numbers.out_of_range} scores out of range"] if numbers.out_of_range else []),
        ]
    )
