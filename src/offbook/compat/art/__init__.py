"""What only code written for OpenPipe ART needs: `import offbook.compat.art as art` has its submodule names too.

For most such code `import offbook as art` is enough. A module of ART that is not here can be imported: its names are
those of offbook, or say what to use instead.
"""

from importlib import import_module
from typing import Any

from . import names
from .modules import stand_in

stand_in()


def __getattr__(name: str) -> Any:
    offbook = import_module("offbook")
    if name in names.NAMES or name in offbook.__all__:
        return getattr(offbook, name)
    if name in names.ELSEWHERE and name not in names.MODULES:
        raise names.missing_name(__name__, name, names.ELSEWHERE[name])
    if name in names.MODULES:
        return import_module(f"{__name__}.{name}")
    return getattr(offbook, name)
