"""What only code written for OpenPipe ART needs: `import understudy.compat.art as art` has its submodule names too.

For most such code `import understudy as art` is enough.
"""

from importlib import import_module

from .names import ELSEWHERE

_SUBMODULES = ("local", "utils")


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name in ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {ELSEWHERE[name]}")
    return getattr(import_module("understudy"), name)
