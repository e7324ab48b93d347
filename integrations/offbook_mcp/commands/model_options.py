"""The command line's options for the model and its server, and what they stand for."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from offbook import LocalBackend, RemoteBackend, TrainableModel, TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.server_options import server_folder
from offbook.base.terminal import echo
from offbook.commands.help_pages import more_option
from offbook_mcp.connection.target import Target
from offbook_mcp.training.defaults import default_config
from offbook_mcp.training.mcp_trainer import MCPTrainer

from .permissions import Permissions
from .target_command import loaded

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


def named_trainer(
    target: str,
    model: str | None = None,
    base_model: str | None = None,
    learner: Mapping[str, Any] | None = None,
    **options: Any,
) -> MCPTrainer:
    """A trainer for a command, a URL, an mcp.json, or `module:name` of a server object. `learner`: options of the
    TrainConfig in place of the base's defaults. A user at a terminal is asked once about tools that may write. Raises ConfigError."""
    remembered = Permissions(server_folder(None) / "mcp" / "permissions.json", sys.stdin.isatty())
    server = Target.parse(loaded(target), decide=remembered)
    named = TrainableModel(model or name_of(server), project="mcp", base_model=base_model or DEFAULT_BASE)
    chosen = dict(learner or {})
    config = default_config(named.base_model, 1, chosen.get("learning_rate"))
    steady = (config(1) if callable(config) else config).model_dump(exclude_unset=True)
    return MCPTrainer(server, named, config=TrainConfig.parse(**steady | chosen), say=echo, **options)
