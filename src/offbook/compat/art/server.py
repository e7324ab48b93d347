"""Stands for `python -m art.server`: says how a server is started."""

import sys

from .names import MODULES, missing_name


def __getattr__(name: str) -> object:
    raise missing_name(__name__, name, MODULES["server"])


if __name__ == "__main__":
    sys.exit(f"offbook.compat.art.server: {MODULES['server']}")
