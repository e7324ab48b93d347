"""The options of `offbook mcp` commands for the target, the model and its server, and what they stand for; and
the permissions that a user gives once."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import logging
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated, Any, TextIO, cast, get_type_hints

import typer
from pydantic import BaseModel, TypeAdapter, ValidationError

from offbook import LocalBackend, RemoteBackend, TrainableModel, TrainConfig
from offbook.base.errors import ConfigError
from offbook.base.server_options import server_folder
from offbook.base.terminal import echo
from offbook.base.text import one_line
from offbook.commands.help_pages import more_option
from offbook.trainer.trainable_target import load_object
from offbook_mcp.connection.servers import Limits
from offbook_mcp.connection.target import Target, TargetLike
from offbook_mcp.tools.tool import ServerDescription, signature
from offbook_mcp.tools.toolset import LIKELY_READS, ModelTool
from offbook_mcp.training.defaults import default_config
from offbook_mcp.training.mcp_trainer import MCPTrainer

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
BaseName = Annotated[
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


@contextmanager
def logs_of_command(file: Path | None) -> Generator[None]:
    """Inside the block, all log records of this process go to `file` (None: nowhere), and Offbook's warnings to stderr.

    Enter it before the server's module is imported: the SDK configures logging only if nobody else has. Says at the end
    where the records are.
    """
    root, own = logging.getLogger(), logging.getLogger("offbook")
    log = logging.NullHandler()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        log = RotatingFileHandler(file, maxBytes=_LARGEST, backupCount=1, encoding="utf-8", delay=True)
        log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
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
        if isinstance(log, RotatingFileHandler) and log.stream is not None:  # pyright: ignore[reportUnnecessaryComparison]  # None until the first record
            echo(f"log records are in {log.baseFilename}", err=True)
        log.close()


class _Decision(BaseModel):
    """A remembered decision about the tool of one signature; `tool` is its name, for whoever reads the file."""

    tool: str
    allowed: bool


_FILE = TypeAdapter(dict[str, _Decision])


@dataclass(frozen=True)
class Permissions:
    """The user's decisions about single tools, kept in `file` by a hash of server and tool.

    A tool that has changed is a new one. `asks`: whether somebody is there to ask.
    """

    file: Path
    asks: bool

    async def __call__(
        self, servers: Sequence[ServerDescription], tools: Sequence[ModelTool], decisions: Mapping[str, bool]
    ) -> Mapping[str, bool]:
        """The decisions of the options, those remembered, and those that the user makes now. Raises ConfigError for a file
        that cannot be read."""
        remembered = self._remembered()
        titles = {server.name: server.title for server in servers}
        keys = {tool.name: _key(tool, titles[tool.tool.server]) for tool in tools}
        known = {name: remembered[key].allowed for name, key in keys.items() if key in remembered} | dict(decisions)
        open_tools = [tool for tool in tools if tool.objection() and tool.name not in known]
        if open_tools and self.asks:
            known |= await _ask(open_tools)
        now = remembered | {keys[name]: _Decision(tool=name, allowed=allowed) for name, allowed in known.items()}
        if now != remembered:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_bytes(_FILE.dump_json(now, indent=1) + b"\n")
            new = ", ".join(
                f"{one_line(one.tool, 64)} {'may' if one.allowed else 'must not'} be called"
                for key, one in now.items()
                if one != remembered.get(key)
            )
            echo(f"remembered until the tool changes: {new} ({one_line(str(self.file))})", err=True)
        return known

    def _remembered(self) -> dict[str, _Decision]:
        try:
            return _FILE.validate_json(self.file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValidationError) as error:
            raise ConfigError(
                f"{self.file}: the remembered permissions cannot be read; remove the file: {error}"
            ) from error


def _key(tool: ModelTool, title: str | None) -> str:
    identity = json.dumps([tool.tool.server, title, signature(tool.tool)])
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


async def _ask(tools: Sequence[ModelTool]) -> dict[str, bool]:
    """Ask which of these tools may be called. At the end of the input, none is allowed."""
    ticked = {tool.name for tool in tools if tool.objection() == LIKELY_READS}
    echo("These tools do not say that they only read (x: their words suggest it):", err=True)
    for tool in tools:
        about = one_line(tool.tool.description, 90)
        box = "[x]" if tool.name in ticked else "[ ]"
        echo(f"  {box} {tool.name}{tool.shown_arguments()}" + (f"  {about}" if about else ""), err=True)
    echo("They would be called with values of our own, and by a model that learns. The answer is remembered.", err=True)
    names = {tool.name for tool in tools}
    while True:
        echo("Which may be called? Enter: those with x, a: all, n: none, or names: ", nl=False, err=True)
        answer = await typed_line(sys.stdin)
        words = "n" if answer is None else answer.replace(",", " ").strip()
        allowed = {"": ticked, "a": names, "n": set[str]()}.get(words.lower(), set(words.split()))
        if names >= allowed:
            return {name: name in allowed for name in names}
        echo(f"There is no {min(allowed - names)!r} among them.", err=True)


async def typed_line(stream: TextIO) -> str | None:
    """Read one line without its end; None at the end of the stream. A daemon thread waits for it, so Ctrl-C does not."""
    loop = asyncio.get_running_loop()
    line: asyncio.Future[str] = loop.create_future()

    def read() -> None:
        text = stream.readline()
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: line.done() or line.set_result(text))

    threading.Thread(target=read, name="typed line", daemon=True).start()
    return (await line).rstrip("\n") if await line else None


async def typed_lines(stream: TextIO) -> AsyncIterator[str]:
    """Yield the stream's lines until it ends."""
    while (line := await typed_line(stream)) is not None:
        yield line
