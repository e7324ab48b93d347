"""Writes docs/options.md from the commands: `python scripts/options_page.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from offbook import plugins
from offbook.commands.main import OWN, PLUGGED, loaded

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command and subcommand with its name."""
    for name in (*OWN, *(name for name in plugins.names(PLUGGED) if name not in OWN)):
        command: Any = typer.main.get_command(loaded(name))
        if not hasattr(command, "commands"):
            yield name, command
        for inner, subcommand in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", subcommand


def rows() -> dict[str, list[str]]:
    """Row of the table -> the commands with that option."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, command in commands():
        context = typer.Context(command, info_name=name)
        for option in getattr(command, "more_options", {}).values():
            usage, text = option.get_help_record(context)
            kind = usage.partition(" <")[2].removesuffix(">").replace("|", ", ").replace(" range", "")
            found[
                f"| `{option.name}` | {kind or 'flag'} | {' '.join(text.split()).replace('] [', '; ').replace('|', chr(92) + '|')}"
            ].append(name)
    return found


def page() -> str:
    """The whole page."""
    table = "\n".join(sorted(f"{row} | {', '.join(names)} |" for row, names in rows().items()))
    return f"""# Options

This page is for you if the help of a command does not list what you want to set. It has every other option of each command.

`--help` lists the options that people set first. Those of runs, learner, engine and server are arguments in Python too, under the same names. On the command line there are three ways to set one:

```
offbook train my_app:agent --scenarios tasks.jsonl --set kl_coef=0.05 --set retries=1
offbook train my_app:agent --scenarios tasks.jsonl --kl-coef 0.05 --retries 1
offbook train my_app:agent --scenarios tasks.jsonl --config options.toml
```

```toml
# options.toml
kl_coef = 0.05
retries = 1
group_size = 16
```

A value of `--set` wins over the file, and `--NAME` over both. The file may have all options of the command, also those of its help. A list in the file is an array. `none` stands for no value.

`python scripts/options_page.py` generates this page from the code.

| option | value | meaning | commands |
|---|---|---|---|
{table}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
