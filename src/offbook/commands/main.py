"""The command `offbook`: finds the command by its name, and imports its module when it runs.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from offbook import __version__, plugins
from offbook.base.errors import ConfigError, OffbookError
from offbook.base.terminal import echo, end_output
from offbook.plugins import imported

from .help_pages import GroupedCommands, HeadedCommand

INTERRUPTED = 130
PLUGGED: Final = "offbook.commands"
"""Entry point group of the commands of integrations. Each is a function, or a `typer.Typer` with several."""
OWN: Final = {
    "quickstart": "quickstart:quickstart",
    "doctor": "doctor:doctor_command",
    "serve": "serve:serve",
    "train": "training:train",
    "eval": "training:evaluate",
    "sft": "training:sft",
    "wrap": "wrap:wrap",
    "runs": "runs:runs",
    "show": "runs:show_records",
    "traces": "traces:traces",
    "checkpoints": "checkpoints:checkpoints",
    "export": "checkpoints:export",
    "import": "checkpoints:import_command",
    "verify": "checkpoints:verify",
    "backup": "checkpoints:backup",
}
"""Command -> its module in this room, and the function or `typer.Typer` there, in the order of the help."""
HEADINGS: Final = {
    "First steps": ("quickstart", "doctor", "serve", "train", "eval"),
    "Train": ("sft", "wrap"),
    "Look": ("runs", "show", "traces"),
    "Keep": ("checkpoints", "export", "import", "verify", "backup"),
}
"""Heading -> commands in `offbook --help`. Commands of integrations stand under the name of their package."""


class LazyCommand(TyperCommand):
    """A command that is only a name until it runs. Its line in the list of commands is read without importing it."""

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first line of the docstring of the command's function, or of its module."""
        return summary(str(self.name))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Import the command and let it parse its arguments. Raises ConfigError for a plugin that is no command."""
        command = typer.main.get_command(loaded(str(self.name)))
        refuse_nan(command)
        return command.make_context(info_name, args, parent, **extra)


def refuse_nan(command: Any) -> None:
    """Let a command, or each of a group, refuse the numbers nan and inf, which no comparison with a bound finds."""
    for parameter in (*command.params, *getattr(command, "more_options", {}).values()):
        parameter.callback = parameter.callback or finite
    for inner in getattr(command, "commands", {}).values():
        refuse_nan(inner)


def finite(context: Any, parameter: Any, value: Any) -> Any:
    """The value of an option. Raises ConfigError if it is a number, and not a finite one."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{parameter.opts[0]}: a finite number is needed, got {value}")
    return value


class Commands(GroupedCommands):
    """The commands of `offbook`."""

    def heading_of(self, name: str) -> str:
        """The heading of a command."""
        for heading, names in HEADINGS.items():
            if name in names:
                return heading
        return "More" if name in OWN else "Wings"


app = typer.Typer(
    cls=Commands,
    name="offbook",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def print_version(wanted: bool) -> None:
    """Print the version of Offbook and exit, if it is `wanted`."""
    if wanted:
        echo(f"offbook {__version__}")
        raise typer.Exit


@app.callback()
def offbook(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Train a small open model to play the LLM's part in the agent you already have."""


def summary(name: str) -> str:
    """What a command does, in one line."""
    if name in OWN:
        module, _, attribute = OWN[name].partition(":")
        return plugins.docstring_line(f"{__package__}.{module}", attribute) or ""
    return plugins.summary(PLUGGED, name) or f"Plugin: see `offbook {name} --help`."


def loaded(name: str) -> typer.Typer:
    """Import a command. Raises ConfigError for an entry point that is neither a function nor a `typer.Typer`."""
    if name in OWN:
        module, _, attribute = OWN[name].partition(":")
        command = getattr(imported(f"{__package__}.{module}", "ui"), attribute)
    else:
        command = plugins.load(PLUGGED, name)
    if isinstance(command, typer.Typer):
        for inner in command.registered_commands:
            inner.cls = HeadedCommand
        return command
    if not isinstance(command, FunctionType):
        raise ConfigError(
            f"plugin {name!r} in {PLUGGED!r} is a {type(command).__name__}, not a function or typer.Typer: fix its entry point"
        )
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    single.command(name, cls=HeadedCommand)(command)
    return single


def add_commands(names: list[str]) -> None:
    """Make commands known by their names."""
    for name in names:
        app.command(name, cls=LazyCommand)(lambda: None)


add_commands(list(OWN))


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):  # for the texts of help and of the user's own code
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    if lost := end_output():
        echo(f"offbook: output could not be written: {lost}", err=True)
    sys.exit(code or int(lost is not None))


def run(words: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    if not words or words[0] not in OWN:  # only then is the list of all installed packages needed
        add_plugged_commands()
    try:
        return guarded(lambda: app(list(words)))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)


def add_plugged_commands() -> None:
    """Add the commands of integrations that are not there yet."""
    known = {command.name for command in app.registered_commands}
    add_commands([name for name in plugins.names(PLUGGED) if name not in known])


def guarded(command: Callable[[], None]) -> int:
    """Run a command and return its exit code. An OffbookError is printed to stderr as one line."""
    try:
        command()
    except ConfigError as error:
        echo(f"offbook: {error}", err=True)
        return 2
    except OffbookError as error:
        echo(f"offbook: {error}", err=True)
        return 1
    except SystemExit as end:  # typer exits this way, also after Ctrl-C, which it does not report
        if end.code == INTERRUPTED:
            echo("offbook: interrupted", err=True)
        raise
    return 0
