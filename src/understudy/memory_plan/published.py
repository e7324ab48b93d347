"""Numbers of published bases (published.json), and where to find those of another."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from .. import tiny
from ..errors import ConfigError
from ..types import Json
from .base_shape import BaseShape, read_shape


@dataclass(frozen=True)
class PublishedBase:
    """`parameters` is the number that the hub shows, `source` where the configuration stands."""

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
    """The shape of a base: `tiny`, a folder, a published name, or a name of the hub. Only config.json is read, and
    downloaded where it must be. Raises ConfigError."""
    for base in published():
        if base.name == name:
            return read_shape(base.config, name)
    folder = tiny.path() if name == "tiny" else Path(name).expanduser()
    return shape_in(folder if folder.exists() else _from_hub(name).parent, name)


def shape_in(folder: Path, name: str) -> BaseShape:
    """The shape of the base in a folder. Raises ConfigError."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {name}: {folder / 'config.json'} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {name}: {folder / 'config.json'} is no JSON object")
    return read_shape(cast(dict[str, Json], config), name)


def _from_hub(name: str) -> Path:
    known = ", ".join(base.name for base in published())
    try:
        from huggingface_hub import hf_hub_download  # pyright: ignore[reportUnknownVariableType]  # untyped in part; a download tool that only this path needs
    except ImportError as error:
        raise ConfigError(
            f"--model {name}: no such folder, and huggingface_hub, which would download its config.json, is not installed: "
            f"pip install huggingface_hub. Known without it: {known}"
        ) from error
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:  # the hub's client raises many kinds; each means that there is no config
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(
            f"--model {name}: no such folder, and the hub gave no config.json ({first}). Known without it: {known}"
        ) from error
