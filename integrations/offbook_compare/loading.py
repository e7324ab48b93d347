"""What the command line names as the target of a comparison or of a training: an app, or an MCP server."""

from __future__ import annotations

import importlib
from typing import Any

from offbook.base.errors import ConfigError
from offbook.trainer.trainable_target import load_target

from .targets import ComparableTarget, ServerTarget

MCP = "mcp:"
"""Before a server's command, URL or mcp.json."""


def load_app(text: str) -> ComparableTarget:
    """The app `module:name`. Raises ConfigError for another object."""
    app: object = load_target(text)
    if not isinstance(app, ComparableTarget):
        raise ConfigError(
            f"target: {text} is of type {type(app).__name__}, whose calls other models cannot answer: name the "
            "object that offbook_langgraph.trainable(...) returned"
        )
    return app


def load_server(text: str, **options: Any) -> ServerTarget | None:
    """The server after `mcp:`, with the options of an `offbook_mcp.MCPTrainer`; None for another text.

    Raises ConfigError, MissingExtraError."""
    if not text.startswith(MCP):
        return None
    named: Any = importlib.import_module("offbook_mcp.commands.model_options")
    return named.named_trainer(text.removeprefix(MCP), **options)
