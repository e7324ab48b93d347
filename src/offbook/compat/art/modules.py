"""Modules of OpenPipe ART that do not exist here: importing one gives a stand-in, whose names are ours or say what to use.

`stand_in()` puts a finder at the end of `sys.meta_path`; it is asked only for modules that Python has not found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from .names import MODULES, NAMES, missing_name, resolve

PACKAGE = __name__.rpartition(".")[0]
_IMPORTING = "<frozen importlib._bootstrap>"
"""File of the frame that looks for a name of `from module import name` before it looks for a submodule."""


class _Package(ModuleType):
    """A module of ART. Its stand-ins do not become attributes, where each would hide a function of its own name."""

    def __setattr__(self, name: str, value: object) -> None:
        if not isinstance(value, _StandIn):
            super().__setattr__(name, value)


class _StandIn(_Package):
    """A module of ART that does not exist here."""


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module in MODULES, or of one in such a stand-in."""
        parent, _, _ = fullname.rpartition(".")
        known = fullname.startswith(f"{PACKAGE}.") and fullname.removeprefix(f"{PACKAGE}.") in MODULES
        if not known and not isinstance(sys.modules.get(parent), _StandIn):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name, f"Stands for {spec.name.removeprefix('offbook.compat.')}.")

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = names_in(module.__name__, only=True)


def stand_in() -> None:
    """Let the modules of ART be imported below this package."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
    sys.modules[PACKAGE].__class__ = _Package


def names_in(module: str, *, only: bool = False) -> Callable[[str], object]:
    """The `__getattr__` of a module of ART: names of its package or of offbook; for others, what to use instead.

    `only`: it has no submodules of its own, so a name that is missing in `from module import name` is an error at once.
    """
    own = module.removeprefix(f"{PACKAGE}.")
    if not only:
        sys.modules[module].__class__ = _Package

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        package = module
        while package != PACKAGE:
            if name in getattr(sys.modules[package], "__all__", ()):
                return getattr(sys.modules[package], name)
            package = package.rpartition(".")[0]
        if name in NAMES:
            return resolve(name)
        offbook = import_module("offbook")
        if name in offbook.__all__:
            return getattr(offbook, name)
        hint = MODULES.get(f"{own}.{name}") or _nearest(own)
        searched = sys._getframe(1).f_code.co_filename == _IMPORTING  # pyright: ignore[reportPrivateUsage]  # no public API tells
        if searched and (only or f"{own}.{name}" in MODULES):
            raise ImportError(f"{module!r} has no {name!r}: {hint}", name=name)
        error = missing_name(module, name, hint)
        submodule = sys.modules.get(f"{module}.{name}")
        if submodule is not None and isinstance(error, AttributeError):
            return submodule
        raise error

    return __getattr__


def _nearest(module: str) -> str:
    while module not in MODULES:
        module = module.rpartition(".")[0]
    return MODULES[module]
