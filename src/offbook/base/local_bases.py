"""The folder of converted base models on this machine: one folder per name, with a note of where its weights came from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from .json_files import read_json

NOTE = "base.json"
"""File in a base's folder: its origin, as JSON. `hub_name` is the name of the original on the Hugging Face hub."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")
OFFERS = "offbook.bases"
"""Entry point group of bases that a command can add: name -> a text that says which command, and what it downloads."""


@dataclass(frozen=True)
class LocalBase:
    """A base in the folder of bases. `reference` is its name on the Hugging Face hub; without one, its folder."""

    name: str
    folder: Path
    reference: str


def bases_folder() -> Path:
    """The folder of bases: the environment variable OFFBOOK_BASES, else `~/.cache/offbook/bases`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(os.environ.get("OFFBOOK_BASES") or cache / "offbook" / "bases").expanduser().absolute()


def local_bases() -> list[LocalBase]:
    """The bases on this machine, by name. A folder without a readable note is none."""
    try:
        names = sorted(path.name for path in bases_folder().iterdir())
    except OSError:
        return []
    return [base for name in names if (base := _read(name)) is not None]


def local_base(name: str) -> LocalBase | None:
    """The base with this name, or with this name on the Hugging Face hub; None if it is not on this machine."""
    if PLAIN_NAME.fullmatch(name):
        return _read(name)
    return next((base for base in local_bases() if base.reference == name), None)


def _read(name: str) -> LocalBase | None:
    folder = bases_folder() / name
    try:
        hub_name = read_json(folder / NOTE).get("hub_name")
    except (OSError, ValueError, AttributeError):
        return None
    known = isinstance(hub_name, str) and bool(hub_name)
    return LocalBase(name, folder, hub_name if known else str(folder.resolve()))
