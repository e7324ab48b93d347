"""`python -m offbook.server`: `offbook serve`, as LocalBackend starts it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from offbook.commands.main import run


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it, and return the exit code."""
    return run(["serve", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
