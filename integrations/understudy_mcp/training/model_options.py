"""The model and its server, as the commands take them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from understudy import LocalBackend, RemoteBackend, TrainableModel
from understudy.integration import ConfigError

from ..connection.target import Target

ModelName = Annotated[str | None, typer.Option("--model", help="name of the model; none: that of the server")]
BaseModel = Annotated[
    str, typer.Option("--base", help="its base: a Hugging Face name, a folder, or tiny, which learns on a CPU")
]
ServerDir = Annotated[Path | None, typer.Option("--dir", help="directory of the server's records; none: ./.understudy")]
ServerUrl = Annotated[str | None, typer.Option("--url", help="a running Understudy server; none: one on this machine")]
ScenarioFile = Annotated[
    Path | None, typer.Option("--scenarios", help="JSONL file; none: the model's own, made at the first use")
]
DEFAULT_BASE = "tiny"


def model_from(target: Target, name: str | None, base: str, dir: Path | None, url: str | None) -> TrainableModel:
    """The model that these options describe. Nothing is started. Raises ConfigError."""
    if dir is not None and url is not None:
        raise ConfigError("--dir, --url: either a directory of this machine, or a server that runs elsewhere")
    backend = RemoteBackend(url) if url else LocalBackend(dir) if dir else None
    return TrainableModel(name or name_of(target), project="mcp", base_model=base, backend=backend)


def name_of(target: Target) -> str:
    """`mcp-server-time` for that server; several are joined by `+` in their order, `-` where a name has other letters."""
    joined = "-".join(server.name for server in target.servers)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", joined).strip("-._")[:60] or "mcp"
