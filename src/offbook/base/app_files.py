"""Tells the app's own source files from those of Python, of installed packages and of this package."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

PACKAGES = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages in a usual environment."""
_HERE = Path(__file__).parents[1]
_LIBRARIES = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib"),
        _HERE,
        _HERE.parents[1] / "integrations",  # of a checkout
    )
)


@functools.cache
def is_app_file(file: str) -> bool:
    """Whether a source file belongs to the app.

    Packages may lie anywhere on `sys.path`: `pip install --target`, a Lambda layer, a zip. They are known by the metadata
    beside them, and a folder may hold both the app and packages. An app in editable mode is the app's own.
    """
    if file.startswith("<") or PACKAGES.intersection(Path(file).parts):
        return False
    resolved = os.path.realpath(file)
    if resolved.startswith(_LIBRARIES):
        return False
    for entry in sys.path:
        root = os.path.realpath(entry or os.curdir) + os.sep
        if resolved.startswith(root) and resolved.removeprefix(root).split(os.sep)[0] in _installed(root):
            return False
    return True


@functools.cache
def _installed(root: str) -> frozenset[str]:
    """The files and folders that the packages installed in a folder of `sys.path` brought."""
    return frozenset(
        path.parts[0]
        for distribution in distributions(path=[root.rstrip(os.sep)])
        if distribution.read_text("RECORD") is not None  # a build of the app leaves an egg-info, without one
        for path in distribution.files or ()
    )
