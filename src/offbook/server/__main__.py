"""`python -m offbook.server`: the command line of the server and of the tools for its directory.

Without a command it serves. `checkpoints` and `export` read a directory, also without a server. `ui`, `runs` and `show`
display its records, `traces` and `models` print them as JSON lines. `verify` and `backup` maintain it. Exit codes: 2 for a wrong option, 1 for a failure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from offbook.base.config import ServerOptions
from offbook.base.errors import ConfigError, MissingExtraError, OffbookError

from .arguments import parse

NEEDED = ("fastapi", "jinja2", "orjson", "peft", "psutil", "sqlalchemy", "torch", "transformers", "uvicorn", "xgrammar")
"""Packages that the server and its two children import. Checked first, since a child without one would just die."""
DIRECTORY = ("checkpoints", "export")
MAINTENANCE = ("verify", "backup")
DISPLAY = ("ui", "runs", "show", "traces", "models")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Errors are printed to stderr without a traceback."""
    try:
        if sys.platform == "win32":
            raise ConfigError("The server needs Linux or macOS; on Windows run it inside WSL2 (`wsl --install`)")
        words = sys.argv[1:] if argv is None else argv
        if words[:1] and words[0] in MAINTENANCE:
            return maintain(words)
        if words[:1] and words[0] in DISPLAY:
            return display(words)
        return read_directory(words) if words[:1] and words[0] in DIRECTORY else run_server(parse(words))
    except ConfigError as error:
        print(f"offbook: {error}", file=sys.stderr)
        return 2
    except OffbookError as error:
        print(f"offbook: {error}", file=sys.stderr)
        return 1


def run_server(options: ServerOptions) -> int:
    """Serve until a signal ends it.

    Imports the web framework here, so that --help stays fast. Raises MissingExtraError.
    """
    _check_extra()
    from .serving import run

    return run(options)


def read_directory(words: Sequence[str]) -> int:
    """List or export checkpoints, and print the result as JSON.

    Raises MissingExtraError and what `directory.answer` raises.
    """
    _check_extra()
    from .stored_models import answer

    print(answer(words))
    return 0


def maintain(words: Sequence[str]) -> int:
    """Verify or back up a directory. Raises MissingExtraError and what `maintenance.run` raises."""
    _check_extra()
    from .maintenance import run

    return run(words)


def display(words: Sequence[str]) -> int:
    """Serve the dashboard of a directory, or print its runs, a rollout, or all rollouts or models as JSON.

    Raises MissingExtraError, ConfigError, StoreError.
    """
    _check_extra()
    if words[0] == "ui":
        from offbook.commands.ui import run_viewer

        return run_viewer(words[1:])
    if words[0] in ("traces", "models"):
        from .json_lines import run_json_lines

        return run_json_lines(words)
    from offbook.commands.runs import run_terminal

    return run_terminal(words)


def _check_extra() -> None:
    for package in NEEDED:
        if find_spec(package) is None:
            raise MissingExtraError(package, "server")


if __name__ == "__main__":
    sys.exit(main())
