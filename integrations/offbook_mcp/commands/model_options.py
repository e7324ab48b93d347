"""The command line options for the model and its server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated

import typer

from offbook import LocalBackend, RemoteBackend, TrainableModel
from offbook.base.errors import ConfigError
from offbook.commands.help_pages import more_option
from offbook_mcp.connection.target import Target

ModelName = Annotated[str | None, typer.Option("--model", help="name of the model  [default: the server's name]")]
BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        help="base model: a Hugging Face name or a folder  [default: the base of --url, else tiny-mcp (CPU)]",
    ),
]
ServerDir = Annotated[
    Path | None, more_option("--dir", help="directory for checkpoints and records  [default: ./.offbook]")
]
ServerUrl = Annotated[
    str | None, more_option("--url", help="URL of a running Offbook server  [default: start one here]")
]
ScenarioFile = Annotated[
    Path | None,
    typer.Option(
        "--scenarios", help="JSONL file of scenarios  [default: the model's own file, generated at first use]"
    ),
]
DEFAULT_BASE = "tiny-mcp"


def model_from(target: Target, name: str | None, base: str | None, dir: Path | None, url: str | None) -> TrainableModel:
    """Create the model that these options describe. Starts nothing, but asks the server at `url` for its base.

    Raises ConfigError, ServerError.
    """
    if dir is not None and url is not None:
        raise ConfigError("--dir, --url: pass only one: a directory of this machine, or the URL of a running server")
    backend = RemoteBackend(url) if url else LocalBackend(dir) if dir else None
    base = base or (asyncio.run(_served_base(backend)) if isinstance(backend, RemoteBackend) else DEFAULT_BASE)
    return TrainableModel(name or name_of(target), project="mcp", base_model=base, backend=backend)


async def _served_base(backend: RemoteBackend) -> str:
    return (await (await backend.connect()).health()).base_model


def name_of(target: Target) -> str:
    """A model name from the servers' names, joined by `-`; other characters become `-`. At most 60 characters."""
    joined = "-".join(server.name for server in target.servers)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", joined).strip("-._")[:60] or "mcp"
