"""Help of the command line: a command's options under their headings, and the commands in groups."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from offbook.base.errors import ConfigError
from offbook.base.option_names import check_options

MORE_OPTIONS = "More options"
"""The heading of `--set` and `--config`. An option of this heading is not listed: they set it, and `--NAME VALUE`."""
more_option = functools.partial(typer.Option, rich_help_panel=MORE_OPTIONS)
"""A `typer.Option` of that heading."""


class HeadedCommand(TyperCommand):
    """A command whose help lists the options under their headings, and names those of `MORE_OPTIONS` in a line."""

    def __init__(self, name: str | None, *, params: list[Any] | None = None, **settings: Any) -> None:
        panels = [(option, getattr(option, "rich_help_panel", None)) for option in params or ()]
        self.more_options = {str(option.name): option for option, panel in panels if panel == MORE_OPTIONS}
        listed = [option for option, panel in panels if panel != MORE_OPTIONS]
        if self.more_options:
            listed += _unread_options()
        super().__init__(name, params=listed, **settings)

    def get_params(self, ctx: Any) -> list[Any]:
        """All options, for the parser."""
        return [*super().get_params(ctx), *self.more_options.values()]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a list per heading, and the names of the other options."""
        lists: dict[str, list[tuple[str, str]]] = {}
        for parameter in super().get_params(ctx):
            if record := parameter.get_help_record(ctx):
                argument = parameter.param_type_name == "argument"
                heading = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or "Options"
                lists.setdefault(heading, []).append(record)
        for heading in sorted(lists, key=lambda heading: heading == MORE_OPTIONS):
            with formatter.section(heading):
                formatter.write_dl(lists[heading])
                if heading == MORE_OPTIONS:
                    formatter.write_paragraph()
                    formatter.write_text(f"Other options (docs/options.md): {', '.join(self.more_options)}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line, with the options of `--config` and then those of `--set` before its own."""
        end = args.index("--") if "--" in args else len(args)
        files, texts, others = list[str](), list[str](), list[str]()
        words = iter(args[:end] if self.more_options else ())
        for word in words:
            flag, equals, value = word.partition("=")
            if flag not in ("--config", "--set"):
                others.append(word)
            elif (text := value if equals else next(words, None)) is None:
                raise ConfigError(f"{flag}: a value is needed")
            else:
                (files if flag == "--config" else texts).append(text)
        if not self.more_options:
            others = args[:end]
        options = {str(option.name): option for option in self.get_params(ctx) if option.param_type_name == "option"}
        settings = [word for file in files for word in _words_of_file(file, options)]
        settings += [word for text in texts for word in _words_of_text(text, options)]
        return super().parse_args(ctx, [*settings, *others, *args[end:]])


def _unread_options() -> list[Any]:
    """`--config` and `--set` for the help: a command takes them off its words before they are parsed."""
    reader = typer.Typer(add_completion=False)
    reader.command()(_more_options)
    options: list[Any] = typer.main.get_command(reader).params
    for option in options:
        option.expose_value = False
    return options


def _more_options(
    config: Annotated[
        str | None,
        typer.Option(help="TOML file of options, NAME = VALUE", metavar="FILE", rich_help_panel=MORE_OPTIONS),
    ] = None,
    set: Annotated[
        str | None, typer.Option(help="set an option; repeatable", metavar="NAME=VALUE", rich_help_panel=MORE_OPTIONS)
    ] = None,
) -> None:
    """The options of each command that has others."""


def _words_of_file(file: str, options: Mapping[str, Any]) -> Iterator[str]:
    try:
        table = tomllib.loads(Path(file).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--config: {file} cannot be read: {error}") from error
    for name, value in table.items():
        check_options(file, [name], options)
        several = isinstance(value, list) and options[name].multiple
        values: list[Any] = cast("list[Any]", value) if several else [value]
        for item in values:
            yield from _words(options[name], item if isinstance(item, str | bool) else json.dumps(item, default=str))


def _words_of_text(text: str, options: Mapping[str, Any]) -> Iterator[str]:
    name, equals, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if not equals:
        raise ConfigError(f"--set {text!r} is not of the form NAME=VALUE")
    check_options("--set", [name], options)
    yield from _words(options[name], value)


def _words(option: Any, value: str | bool) -> Iterator[str]:
    """The words of an option on the command line."""
    if not option.is_flag:
        yield f"{option.opts[0]}={value}"
    elif str(value).lower() not in ("true", "false"):
        raise ConfigError(f"{option.opts[0]}: true or false is needed, got {value!r}")
    elif str(value).lower() == "true":
        yield option.opts[0]
    else:
        yield from option.secondary_opts[:1]


class GroupedCommands(TyperGroup):
    """A command group whose help lists the commands under headings."""

    def heading_of(self, name: str) -> str:
        """The heading of a command."""
        raise NotImplementedError

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list of commands per heading."""
        names = self.list_commands(ctx)
        width = max(map(len, names))
        lists: dict[str, list[tuple[str, str]]] = {}
        for name in names:
            line = self.commands[name].get_short_help_str(formatter.width - 6 - width)
            lists.setdefault(self.heading_of(name), []).append((name.ljust(width), line))
        for heading, rows in lists.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
