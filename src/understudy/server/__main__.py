"""`python -m understudy.server`: argv -> ServerOptions -> run; with `checkpoints` or `export` an answer about a directory
on which no server runs, with `ui`, `runs` or `show` its records to look at; `verify` and `backup` look after one. Exit codes: 2
for a wrong option, 1 for a failure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from ..config import ServerOptions
from ..errors import ConfigError, MissingExtraError, UnderstudyError
from .arguments import parse

NEEDED = ("fastapi", "jinja2", "orjson", "peft", "psutil", "sqlalchemy", "torch", "transformers", "uvicorn", "xgrammar")
"""What the server and its two children import; a sampler that lacks one would only die."""
ABOUT_A_DIRECTORY = ("checkpoints", "export")
MAINTENANCE = ("verify", "backup")
TO_LOOK_AT = ("ui", "runs", "show")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to end; errors are one sentence on stderr."""
    try:
        if sys.platform == "win32":
            raise ConfigError("The server needs Linux or macOS; on Windows run it inside WSL2 (`wsl --install`)")
        words = sys.argv[1:] if argv is None else argv
        if words[:1] and words[0] in MAINTENANCE:
            return maintain(words)
        if words[:1] and words[0] in TO_LOOK_AT:
            return look_at(words)
        return answer_for(words) if words[:1] and words[0] in ABOUT_A_DIRECTORY else run_server(parse(words))
    except ConfigError as error:
        print(f"understudy: {error}", file=sys.stderr)
        return 2
    except UnderstudyError as error:
        print(f"understudy: {error}", file=sys.stderr)
        return 1


def run_server(options: ServerOptions) -> int:
    """The web framework is loaded when there is something to serve, not for --help. Raises MissingExtraError."""
    _check_extra()
    from .serving import run

    return run(options)


def answer_for(words: Sequence[str]) -> int:
    """Print what a command answers about a directory. Raises MissingExtraError and what `directory.answer` raises."""
    _check_extra()
    from .directory import answer

    print(answer(words))
    return 0


def maintain(words: Sequence[str]) -> int:
    """Verify or back up a directory. Raises MissingExtraError and what `maintenance.run` raises."""
    _check_extra()
    from .maintenance import run

    return run(words)


def look_at(words: Sequence[str]) -> int:
    """Serve the dashboard of a directory, or print its runs. Raises MissingExtraError, ConfigError, StoreError."""
    _check_extra()
    if words[0] == "ui":
        from .viewing import run_viewer

        return run_viewer(words[1:])
    from .terminal import run_terminal

    return run_terminal(words)


def _check_extra() -> None:
    for package in NEEDED:
        if find_spec(package) is None:
            raise MissingExtraError(package, "server")


if __name__ == "__main__":
    sys.exit(main())
