"""Which tools a command may call: asks once about those of unknown kind, and remembers the user's decisions in a file."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from offbook.base.errors import ConfigError
from offbook.base.terminal import echo
from offbook.base.text import one_line
from offbook_mcp.connection.typed_lines import typed_line
from offbook_mcp.tools.effects import ToolKind
from offbook_mcp.tools.tool import signature
from offbook_mcp.tools.toolset import ModelTool
from offbook_mcp.tools_page import arguments

_YES, _NO = ("y", "yes", "all"), ("", "n", "no", "none")


class _Decision(BaseModel):
    """A remembered decision about the tool of one signature; `tool` is its name, for whoever reads the file."""

    tool: str
    allowed: bool


_FILE = TypeAdapter(dict[str, _Decision])


@dataclass(frozen=True)
class Permissions:
    """The user's decisions about single tools, kept in `file` by the tools' signatures.

    A tool that has changed is a new one. `asks`: whether somebody is there to ask about tools of unknown kind.
    """

    file: Path
    asks: bool

    async def __call__(self, tools: Sequence[ModelTool], decisions: Mapping[str, bool]) -> Mapping[str, bool]:
        """The decisions of the options, those remembered, and those that the user makes now. Raises ConfigError for a file
        that cannot be read."""
        remembered = self._remembered()
        keys = {tool.name: _key(tool) for tool in tools}
        known = {name: remembered[key].allowed for name, key in keys.items() if key in remembered} | dict(decisions)
        unknown = [tool for tool in tools if tool.tool.kind is ToolKind.UNKNOWN and tool.name not in known]
        if unknown and self.asks:
            known |= await _asked(unknown)
        now = remembered | {keys[name]: _Decision(tool=name, allowed=allowed) for name, allowed in known.items()}
        if now != remembered:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_bytes(_FILE.dump_json(now, indent=1) + b"\n")
            new = [one for key, one in now.items() if one != remembered.get(key)]
            said = ", ".join(
                f"{one_line(one.tool, 64)} {'may' if one.allowed else 'must not'} be called" for one in new
            )
            echo(f"remembered until the tool changes: {said} ({one_line(str(self.file))})", err=True)
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


def _key(tool: ModelTool) -> str:
    return hashlib.sha256(signature(tool.tool).encode()).hexdigest()[:16]


async def _asked(tools: Sequence[ModelTool]) -> dict[str, bool]:
    """Ask which of these tools only read. Without an answer, none is allowed."""
    echo("Nothing says whether these tools only read:", err=True)
    for tool in tools:
        about = one_line(tool.tool.description, 90)
        echo(f"  {tool.name}{arguments(tool)}" + (f"  {about}" if about else ""), err=True)
    echo("They would be called with values of our own, and by a model that learns. The answer is remembered.", err=True)
    names = {tool.name for tool in tools}
    while True:
        echo("Do they only read? [y]es, [N]o, or the names of those that do: ", nl=False, err=True)
        answer = (await typed_line(sys.stdin)) or ""
        words = answer.replace(",", " ").split()
        if " ".join(words).lower() in (*_YES, *_NO):
            return dict.fromkeys(names, answer.strip().lower() in _YES)
        if names.issuperset(words):
            return {name: name in words for name in names}
        echo(f"There is no {min(set(words) - names)!r} among them.", err=True)
