"""The command line of the server: one flag per field of ServerOptions and EngineOptions."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from offbook.base.config import EngineOptions, ServerOptions
from offbook.base.errors import ConfigError

KEY_VARIABLE = "OFFBOOK_API_KEY"
"""Environment variable with the default of --api-key."""


def parse(argv: Sequence[str]) -> ServerOptions:
    """Parse a command line. Raises ConfigError that names the flag; --help and unknown flags raise SystemExit.

    >>> options = parse(["--model", "tiny", "--max-loras", "4"])
    >>> options.model, options.engine.max_loras
    ('tiny', 4)
    """
    values = {name: value for name, value in vars(_parser().parse_args(argv)).items() if value is not None}
    engine = {name: values.pop(name) for name in EngineOptions.model_fields if name in values}
    if "api_key" not in values and os.environ.get(KEY_VARIABLE):
        values["api_key"] = os.environ[KEY_VARIABLE]
    if "dir" in values:
        values["dir"] = Path(values["dir"]).expanduser().absolute()
    try:
        return ServerOptions.model_validate(values | {"engine": engine})
    except ValidationError as error:
        raise ConfigError("\n".join(_message(fault) for fault in error.errors(include_url=False))) from error


def _message(fault: ErrorDetails) -> str:
    """The message of a validation error, with the flag in place of the field."""
    field = fault["loc"][1:] if fault["loc"][:1] == ("engine",) else fault["loc"]
    if not field:  # an error of several options, whose message may begin with `field: `
        name, colon, rest = str(fault.get("ctx", {}).get("error", fault["msg"])).partition(": ")
        return f"{_flag(name)}{colon}{rest}" if name in EngineOptions.model_fields else name + colon + rest
    return f"{_flag(str(field[0]))}: {fault['msg']} (got {fault['input']!r})"


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offbook serve",
        description="Serve a model with OpenAI's API, record its calls, and train it.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
    )
    server = parser.add_argument_group("server")
    for name, option in ServerOptions.model_fields.items():
        if name != "engine":
            _add_flag(server, name, option)
    engine = parser.add_argument_group("engine")
    for name, option in EngineOptions.model_fields.items():
        _add_flag(engine, name, option)
    return parser


def _add_flag(group: argparse._ArgumentGroup, name: str, option: FieldInfo) -> None:  # pyright: ignore[reportPrivateUsage]  # argparse has no public name for the type
    description = (option.description or "").replace("%", "%%")
    default: object = option.get_default(call_default_factory=True, validated_data={})
    shown = "" if default in (None, (), {}, PydanticUndefined) else f" (default: {default})"
    if name == "api_key":
        shown = f" (default: {KEY_VARIABLE})"
    if option.annotation is bool:
        group.add_argument(
            _flag(name), dest=name, action=argparse.BooleanOptionalAction, default=None, help=description + shown
        )
        return
    group.add_argument(_flag(name), dest=name, default=None, metavar=_metavar(option), help=description + shown)


def _metavar(option: FieldInfo) -> str:
    """The placeholder of the value in --help, such as `N` or `SECONDS`."""
    text = str(option.annotation)
    if "Literal" in text:
        return "|".join(str(choice) for choice in getattr(option.annotation, "__args__", ()))
    if "tuple" in text:
        return "N,..." if "int" in text else "KEY,..." if "_viewer_key" in text else "URL,..."
    return "N" if "int" in text else "SECONDS" if "float" in text else "TEXT"
