"""The options of `offbook mcp` commands for the target, the model and its server, and what they stand for."""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import logging
import re
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import typer

from offbook import LocalBackend, RemoteBackend, TrainableModel, TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.server_options import server_folder
from offbook.base.terminal import echo
from offbook.commands.help_pages import more_option
from offbook.trainer.trainable_target import load_object
from offbook_mcp.connection.servers import Limits
from offbook_mcp.connection.target import Target, TargetLike
from offbook_mcp.training.defaults import default_config
from offbook_mcp.training.mcp_trainer import MCPTrainer

from .permissions import Permissions

TargetArgument = Annotated[
    str, typer.Argument(help="MCP server: a command in quotes, a URL, an mcp.json, or module:name of a server object")
]
Only = Annotated[list[str], more_option(help="use only this tool; repeatable")]
Allow = Annotated[list[str], typer.Option(help="call this tool although it may write (remembered); repeatable")]
AllowAll = Annotated[bool, more_option("--allow-all", help="call all tools, except those that may show secrets")]
Deny = Annotated[list[str], more_option(help="never call or show this tool (remembered); repeatable")]
ReadOnly = Annotated[bool, more_option("--read-only", help="declare that all tools of the server only read")]
Bind = Annotated[
    list[str],
    more_option(help="set a tool's argument (argument=value) and hide it from the model; may use {rollout_dir}"),
]
Header = Annotated[list[str], more_option(help="HTTP header, 'Name: value'; may use ${env:TOKEN}")]
Env = Annotated[list[str], more_option(help="environment variable for the command: NAME or NAME=value")]
Fixture = Annotated[Path | None, more_option(help="folder to copy to {rollout_dir} for each rollout")]
Stateless = Annotated[
    bool | None,
    more_option(
        "--stateless/--isolated",
        help="share one server between rollouts, or give each its own  [default: share if every tool is read-only]",
    ),
]
StartTimeout = Annotated[float, more_option(min=0.1, help="seconds to wait for the server to start")]
CallTimeout = Annotated[
    float | None,
    more_option(min=0.1, help="seconds to wait for the answer to a tool call  [default: 60; 5 while exploring]"),
]


def loaded(target: str) -> TargetLike:
    """Import the object named `module:name`, also from the current folder. Returns any other text unchanged.

    Raises ConfigError when the module or the name does not exist.
    """
    module, colon, name = target.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        return target
    return cast(TargetLike, load_object(target))  # `Target.parse` rejects other types


def pairs(texts: list[str], separator: str, option: str) -> dict[str, str]:
    """Parse `name=value` texts to a mapping. Raises ConfigError."""
    mapping: dict[str, str] = {}
    for text in texts:
        name, mark, value = text.partition(separator)
        if not mark or not name.strip():
            raise ConfigError(f"--{option}: {text!r} is not of the form name{separator}value")
        mapping[name.strip()] = value.strip()
    return mapping


def variable(text: str) -> tuple[str, str]:
    """Parse `NAME=value`. `NAME` alone becomes a reference to this process's variable, so that its value is not recorded."""
    name, equals, value = text.partition("=")
    return name, value if equals else f"${{env:{name}}}"


def on_target(function: Callable[..., None], *, calls_tools: bool = True) -> Callable[..., None]:
    """Turn `function(target, ...)` into a typer command.

    The command takes the target's argument, the function's own options and those of `_target`, and builds the Target. With
    `calls_tools`, a user at a terminal is asked about tools that do not say that they only read.
    """
    own = list(inspect.signature(function).parameters.values())[1:]
    target, *options = inspect.signature(_target).parameters.values()

    @functools.wraps(function)
    def command(**words: Any) -> None:
        described = {name: words.pop(name) for name in (target.name, *(option.name for option in options))}
        folder = server_folder(words.get("dir"))
        runs = calls_tools and not words.get("dry_run")
        asks = runs and sys.stdin.isatty() and not described["allow_all"]
        with logs_of_command(folder / "logs" / "mcp.log" if runs else None):
            decide = Permissions(folder / "mcp" / "permissions.json", asks)
            function(replace(_target(**described), decide=decide), **words)

    hints = get_type_hints(function, include_extras=True) | get_type_hints(_target, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    listed = (target, *own, *options)
    named = [parameter.replace(annotation=hints[parameter.name], kind=kind) for parameter in listed]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in named} | {"return": None}
    command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]  # read by typer
    return command


def _target(
    target: TargetArgument,
    only: Only = [],  # noqa: B006  # typer reads it
    allow: Allow = [],  # noqa: B006
    allow_all: AllowAll = False,
    deny: Deny = [],  # noqa: B006
    read_only: ReadOnly = False,
    bind: Bind = [],  # noqa: B006
    header: Header = [],  # noqa: B006
    env: Env = [],  # noqa: B006
    fixture: Fixture = None,
    stateless: Stateless = None,
    start_timeout: StartTimeout = Limits().start_seconds,
    call_timeout: CallTimeout = None,
) -> Target:
    """Build the target. Its parameters are the options of every command that takes one. Raises ConfigError."""
    limits = Limits(start_seconds=start_timeout)
    if call_timeout is not None:
        limits = replace(limits, call_seconds=call_timeout, explore_seconds=call_timeout)
    return Target.parse(
        loaded(target),
        headers=pairs(header, ":", "header"),
        env={name: value for name, value in (variable(text) for text in env)},
        only=tuple(only),
        allow=tuple(allow),
        allow_all=allow_all,
        deny=tuple(deny),
        read_only=read_only,
        bind=pairs(bind, "=", "bind"),
        fixture=fixture,
        stateless=stateless,
        limits=limits,
    )


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


_LARGEST = 2**22
"""Bytes of the file, of which one earlier part is kept."""
_LINE = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")


class TargetLog(RotatingFileHandler):
    """The file; it and its folder are made with the first record."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, maxBytes=_LARGEST, backupCount=1, encoding="utf-8", delay=True)
        self.setFormatter(_LINE)

    def _open(self) -> io.TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()

    @property
    def used(self) -> bool:
        """Whether a record was written."""
        return self.stream is not None  # pyright: ignore[reportUnnecessaryComparison]  # None until the first record


@contextmanager
def logs_of_command(file: Path | None) -> Generator[None]:
    """Inside the block, all log records of this process go to `file` (None: nowhere), and Offbook's warnings to stderr.

    Enter it before the server's module is imported: the SDK configures logging only if nobody else has. Says at the end
    where the records are.
    """
    root, own = logging.getLogger(), logging.getLogger("offbook")
    log = logging.NullHandler() if file is None else TargetLog(file)
    warnings = logging.StreamHandler(sys.stderr)
    warnings.setLevel(logging.WARNING)
    level = root.level
    root.addHandler(log)
    own.addHandler(warnings)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(log)
        own.removeHandler(warnings)
        if isinstance(log, TargetLog) and log.used:
            echo(f"log records are in {log.baseFilename}", err=True)
        log.close()
