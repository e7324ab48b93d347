"""Help of the command line: a command's options under their headings, and the commands in groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from offbook.base.errors import ConfigError

MORE_OPTIONS = "More options"
"""The heading of `--set` and `--config`, below which the options are named that are not listed."""


class HeadedCommand(TyperCommand):
    """A command whose help lists the options under their headings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a list per heading, and the names of the other options."""
        lists: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                argument = parameter.param_type_name == "argument"
                heading = "Arguments" if argument else getattr(parameter, "rich_help_panel", None) or "Options"
                lists.setdefault(heading, []).append(record)
        for heading in sorted(lists, key=lambda heading: heading == MORE_OPTIONS):
            with formatter.section(heading):
                formatter.write_dl(lists[heading])
                if heading == MORE_OPTIONS:
                    formatter.write_paragraph()
                    names = ", ".join(item.flag for item in self._more_options())
                    formatter.write_text(f"They and docs/options.md also have: {names}")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line, on which `--NAME VALUE` is short for `--set NAME=VALUE`."""
        end = args.index("--") if "--" in args else len(args)
        return super().parse_args(ctx, [*self._settings(args[:end]), *args[end:]])

    def _settings(self, args: Sequence[str]) -> Iterator[str]:
        more = {item.flag: item for item in self._more_options()}
        words = iter(args)
        for word in words:
            flag, equals, value = word.partition("=")
            off = flag.startswith("--no-") and flag not in more
            item = more.get(flag.replace("--no-", "--", 1) if off else flag)
            if item is None or (off and item.word is not bool):
                yield word
                continue
            if item.word is bool and not equals:
                value = "false" if off else "true"
            elif not equals:
                value = next(words, None)
            if value is None:
                raise ConfigError(f"{flag}: a value is needed")
            yield from ("--set", f"{item.name}={value}")

    def _more_options(self) -> list[Any]:
        return [item for item in getattr(self.callback, "option_fields", ()) if not item.headline]


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
