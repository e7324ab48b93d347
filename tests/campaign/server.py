"""The server as the campaign starts it: a wall clock that a file shifts, and a sweep of unclaimed calls every second.

python -m tests.campaign.server CLOCK_FILE [options of offbook serve]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_wall = time.time


def shift_clock(file: Path) -> None:
    """From now on the wall clock of this process is off by the seconds that `file` says; the running time is not."""

    def shifted() -> float:
        try:
            return _wall() + float(file.read_text() or 0)
        except (OSError, ValueError):
            return _wall()

    time.time = shifted


def main() -> int:
    shift_clock(Path(sys.argv[1]))
    from offbook.server import serving
    from offbook.server.__main__ import main as serve

    serving.EXPIRY_SECONDS = 1.0
    return serve(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
