"""Move an app's calls from a paid model to yours, if its scores show that yours is good enough."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.client.connection.http import Api
from offbook.commands.directory import server_needed
from offbook.commands.generated_options import with_options
from offbook.commands.options import Dir, Server

from .client import change_takeover, takeover_state
from .wire import Numbers, TakeoverRule, TakeoverState

app = typer.Typer(
    help=__doc__,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Route = Annotated[str | None, typer.Option(help="app whose calls move, by its route  [default: the server's --route]")]


@app.command()
@with_options(TakeoverRule)
def start(url: Server = None, dir: Dir = None, route: Route = None, options: dict[str, Any] = {}) -> None:  # noqa: B006  # the decorator passes it
    """Let your model answer a share of threads, then all of them or none."""
    try:
        rule = TakeoverRule.model_validate(options)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = f"--{str(fault['loc'][0]).replace('_', '-')}: " if fault["loc"] else ""
        raise ConfigError(f"{name}{fault['msg'].removeprefix('Value error, ')}") from error
    _show(asyncio.run(change_takeover(_api(url, dir), "start", rule, route)))


@app.command()
def status(url: Server = None, dir: Dir = None, route: Route = None, json: Json = False) -> None:
    """Show the numbers, and every decision."""
    state = asyncio.run(takeover_state(_api(url, dir), route))
    if json:
        echo(state.model_dump_json(indent=1, ensure_ascii=True))
    else:
        _show(state)


@app.command()
def stop(url: Server = None, dir: Dir = None, route: Route = None) -> None:
    """Give all calls to the paid model again, at once."""
    _show(asyncio.run(change_takeover(_api(url, dir), "stop", route=route)))


def _api(url: Any, dir: Any) -> Api:
    return server_needed(url, dir, "offbook serve --upstream ...")


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
    return ", ".join([*parts, *([f"{numbers.out_of_range} scores out of range"] if numbers.out_of_range else [])])
