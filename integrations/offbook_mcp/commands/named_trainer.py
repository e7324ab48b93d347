"""An MCPTrainer from words of a command line, for commands of other packages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from offbook import TrainableModel, TrainConfig
from offbook.base.server_options import server_folder
from offbook.base.terminal import echo
from offbook_mcp.connection.target import Target
from offbook_mcp.training.defaults import default_config
from offbook_mcp.training.mcp_trainer import MCPTrainer

from .model_options import DEFAULT_BASE, name_of
from .permissions import Permissions
from .target_options import loaded


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
