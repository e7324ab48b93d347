"""What only code written for OpenPipe ART needs: `import understudy.compat.art as art` has its submodule names too.

For most such code `import understudy as art` is enough.
"""

from importlib import import_module
from typing import Any

from .names import ELSEWHERE, missing_name

_SUBMODULES = ("guided_completion", "langgraph", "local", "mcp", "rewards", "server", "utils")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name in ELSEWHERE:
        raise missing_name(__name__, name, ELSEWHERE[name])
    return getattr(import_module("understudy"), name)
