"""`python -m understudy.server`: argv -> ServerOptions -> run. Exit codes: 2 for a wrong option, 1 for a failure."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import ConfigError, UnderstudyError
from .arguments import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to end; errors are one sentence on stderr."""
    try:
        if sys.platform == "win32":
            raise ConfigError("The server needs Linux or macOS; on Windows run it inside WSL2 (`wsl --install`)")
        options = parse(sys.argv[1:] if argv is None else argv)
        from .serving import run  # the web framework is loaded when there is something to serve, not for --help

        return run(options)
    except ConfigError as error:
        print(f"understudy: {error}", file=sys.stderr)
        return 2
    except UnderstudyError as error:
        print(f"understudy: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
