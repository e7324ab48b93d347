"""Configurations of published bases (published.json), and where to find that of another base."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from offbook.base.errors import ConfigError
from offbook.base.json_files import read_json
from offbook.base.types import Json

from .. import tiny
from .base_shape import BaseShape, read_shape


@dataclass(frozen=True)
class PublishedBase:
    """A base on the Hugging Face hub. `parameters` is the number that the hub shows, `source` the URL of the
    configuration."""

    name: str
    source: str
    parameters: int
    config: dict[str, Json]


@cache
def published() -> tuple[PublishedBase, ...]:
    """The bases of published.json."""
    text = (Path(__file__).parent / "published.json").read_text("utf-8")
    return tuple(PublishedBase(**entry) for entry in json.loads(text))


def find_shape(name: str) -> BaseShape:
    """The shape of a base: a bundled policy, a folder, a base of published.json, or a name on the hub. Only config.json
    is read, and downloaded if necessary. Raises ConfigError if it cannot be read or planned."""
    for base in published():
        if base.name == name:
            return read_shape(base.config, name)
    folder = tiny.path(name) if name in tiny.FOLDERS else Path(name).expanduser()
    return shape_in(folder if folder.exists() else _from_hub(name).parent, name)


def shape_in(folder: Path, name: str) -> BaseShape:
    """The shape of the base in a folder. Raises ConfigError if its config.json cannot be read or planned."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {name}: {folder / 'config.json'} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {name}: {folder / 'config.json'} is not a JSON object")
    return read_shape(cast(dict[str, Json], config), name)


def _from_hub(name: str) -> Path:
    """Download a base's config.json. Raises ConfigError."""
    known = ", ".join(base.name for base in published())
    try:
        from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]  # untyped in part; a download tool that only this path needs
    except ImportError as error:
        raise ConfigError(
            f"--model {name}: there is no such folder, and huggingface_hub is not installed, so its config.json cannot be "
            f"downloaded: pip install huggingface_hub. Known without it: {known}"
        ) from error
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # the hub's client raises many types; after any of them there is no config
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"--model {name}: there is no such folder, and its config.json could not be downloaded from the hub ({first}). "
            f"Known without a download: {known}"
        ) from error
