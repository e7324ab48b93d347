"""Imports a module when a command runs, and names the extra whose packages it needs."""

from __future__ import annotations

import importlib
from typing import Any

from offbook.base.errors import MissingExtraError


def imported(module: str, extra: str) -> Any:
    """Import a module. Raises MissingExtraError for a package of `extra` that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "offbook":
            raise
        raise MissingExtraError(error.name, extra) from error
