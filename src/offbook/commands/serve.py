"""The command `offbook serve`. Its options are the fields of ServerOptions and EngineOptions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from offbook import plugins
from offbook.base.config import Options
from offbook.base.errors import ConfigError, MissingExtraError
from offbook.base.http_access import KEY_VARIABLE, key_option
from offbook.base.server_options import EngineOptions, ServerOptions
from offbook.plugins import imported

from .generated_options import with_options

NEEDED = (
    "fastapi",
    "jinja2",
    "orjson",
    "peft",
    "psutil",
    "sqlalchemy",
    "torch",
    "transformers",
    "uvicorn",
    "xgrammar",
)
"""Packages that the server and its two children import. Checked first, since a child without one would just die."""
Folder = Annotated[
    Path | None,
    typer.Option(
        rich_help_panel=ServerOptions.heading,
        help=f"{ServerOptions.model_fields['dir'].description}  [default: ./.offbook]",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        rich_help_panel=ServerOptions.heading,
        help="key that clients must send, or @FILE; if --host is not loopback, a missing key is generated and stored "
        "in --dir  "
        f"[default: {KEY_VARIABLE}]",
    ),
]


WINGS = {
    name: plugins.load_class("offbook.serve_options", name, Options) for name in plugins.names("offbook.serve_options")
}
"""The options of the installed wings of the server, by the wing's name."""


@with_options(ServerOptions, EngineOptions, *WINGS.values(), without=["wings"])
def serve(dir: Folder = None, api_key: ApiKey = None, *, options: dict[str, Any]) -> None:
    """Serve a model with OpenAI's API, record its calls, and train it.

    \b
    Examples:
      offbook serve --model tiny
      offbook serve --model Qwen/Qwen2.5-7B-Instruct --host 0.0.0.0 --api-key @key.txt
    """
    folder = None if dir is None else dir.expanduser().absolute()
    chosen = server_options(options | {"dir": folder, "api_key": key_option(api_key)})
    raise typer.Exit(run_server(chosen))


def server_options(values: Mapping[str, object]) -> ServerOptions:
    """The options from the values on the command line; None: not written. Raises ConfigError that names the option.

    >>> options = server_options({"model": "tiny", "max_loras": 4})
    >>> options.model, options.engine.max_loras
    ('tiny', 4)
    """
    written = {name: value for name, value in values.items() if value is not None}
    engine = {name: written.pop(name) for name in EngineOptions.model_fields if name in written}
    try:
        wings = {
            wing: options.model_validate({name: written.pop(name) for name in options.model_fields if name in written})
            for wing, options in WINGS.items()
        }
        return ServerOptions.model_validate(written | {"engine": engine, "wings": wings})
    except ValidationError as error:
        raise ConfigError("\n".join(_message(fault) for fault in error.errors(include_url=False))) from error


def run_server(options: ServerOptions) -> int:
    """Serve until a signal ends it, and return the exit code. Raises ConfigError on Windows, MissingExtraError."""
    if sys.platform == "win32":
        raise ConfigError("The server needs Linux or macOS; on Windows run it inside WSL2 (`wsl --install`)")
    for package in NEEDED:
        if find_spec(package) is None:
            raise MissingExtraError(package, "server")
    return imported("offbook.server.serving", "server").run(options)


def _message(fault: ErrorDetails) -> str:
    """The message of a validation error, with the option in place of the field."""
    field = fault["loc"][1:] if fault["loc"][:1] == ("engine",) else fault["loc"]
    if not field:  # an error of several options, whose message may begin with `field: `
        name, colon, rest = str(fault.get("ctx", {}).get("error", fault["msg"])).partition(": ")
        return f"{_option(name)}{colon}{rest}" if name in EngineOptions.model_fields else name + colon + rest
    return f"{_option(str(field[0]))}: {fault['msg']} (got {fault['input']!r})"


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
