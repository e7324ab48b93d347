"""Which tools a command may call: asks once about those that do not say that they only read, and remembers the answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from pydantic import BaseModel, TypeAdapter, ValidationError

from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.base.text import one_line
from offbook_mcp.tools.tool import ServerDescription, signature
from offbook_mcp.tools.toolset import LIKELY_READS, ModelTool


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
