"""Tools as a server lists them, and what their words suggest about their calls.

Words tick a question and say how carefully an allowed tool is called. They never permit a call: only an annotation, or the user,
does (`Toolset.permitted`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import cast

from mcp import types

from offbook.base.errors import ConfigError
from offbook.base.text import word_list
from offbook_mcp.connection.servers import ROLLOUT_DIR


class ToolKind(StrEnum):
    """The effect of a tool's call."""

    READ = "read"  # changes nothing
    WRITE = "write"  # adds, changes or deletes something
    UNKNOWN = "unknown"  # may do so: nothing tells


_WRITING = frozenset(
    word_list(
        """accept acknowledge activate abort add adjust append apply approve assign attach authorize ban buy cancel checkout
    clear click configure connect copy create deactivate delete destroy disable disconnect dismiss drag drop edit
    enable enqueue erase fill grant insert install invite join kick kill leave make manage mark mkdir modify move mute
    overwrite patch pause pay press provision publish purchase purge push put reassign rebase redeem refund register
    remove rename reopen reorder replace reply reschedule reserve reset resize restart restore resume retry revoke rm
    rollback rotate save send set sign stage start stop store submit subscribe suspend swap switch sync terminate
    toggle transition trigger truncate unassign unblock undo uninstall unlock unpin unsubscribe update upgrade upload
    upsert use wipe withdraw write"""
    )
)
_READING = frozenset(
    word_list(
        """aggregate analyse analyze browse calculate check classify compare compute convert count decode describe detect
    diff discover display distinguish divide echo encode enumerate estimate explain explore extract fetch filter find
    forecast get grep help identify inspect is list locate look lookup ls measure multiply peek ping predict preview
    query rank read recall recommend retrieve return scrape search show stat subtract suggest sum summarise summarize
    tell tokenize translate validate verify view"""
    )
)
_EITHER = frozenset(
    word_list(
        """archive ask back backup book build call capture change charge clone close comment commit compile crawl deploy
    download draw dump evaluate execute export follow fork format generate import load log merge monitor navigate open
    order play plot post print process render resolve run schedule select share ship simulate sort take transfer
    transform wait watch"""
    )
)
"""Verbs that read in one tool and write in another."""
_VERB_PLACES = re.compile(
    r"(?:^|[,;.(\n]\s*(?:(?:and|or|then)\s+)?|\b(?:and|or|then|to|will|also)\s+)(?:[a-z]+ly )?([a-z]+)"
)
_LASTING = re.compile(r"permanent|irreversib|cannot be undone", re.IGNORECASE)
_PRIVATE = frozenset(["env", "environment", "secret", "credential", "password", "token", "apikey"])


def suggested_kind(name: str, description: str, hints: types.ToolAnnotations | None = None) -> ToolKind:
    """What annotations say, else what the verbs of name and description suggest. UNKNOWN if they suggest nothing."""
    if hints is not None and (hints.read_only_hint is not None or hints.destructive_hint):
        return ToolKind.READ if hints.read_only_hint else ToolKind.WRITE
    verb = next((word for word in words_of_name(name) if is_verb(word)), "")
    named = set(_VERB_PLACES.findall(" ".join(words_of_name(name))))
    described = [set(_base_forms(word)) for word in _VERB_PLACES.findall(description.lower())]
    if named & _WRITING or _LASTING.search(description):
        return ToolKind.WRITE
    if verb in _WRITING or any(forms & _WRITING or (forms & _EITHER and verb not in _READING) for forms in described):
        return ToolKind.WRITE
    if verb in _READING or (described and described[0] & _READING):
        return ToolKind.READ
    return ToolKind.UNKNOWN


def reads_secrets(name: str) -> bool:
    """Whether a tool's name speaks of secrets or of the environment, such as `get-env`: its results must not be recorded."""
    words = [word.removesuffix("s") for word in words_of_name(name)]
    return not _PRIVATE.isdisjoint([*words, *map("".join, pairwise(words))])


def is_verb(word: str) -> bool:
    """Whether a word of a tool's name is a known verb."""
    return word in _READING or word in _WRITING or word in _EITHER


def words_of_name(name: str) -> list[str]:
    """The lower-case words of a name in any of the usual spellings."""
    return re.findall(r"[a-z]+", re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name).lower())


def _base_forms(word: str) -> Iterator[str]:
    """The possible base forms of a verb: `retrieving` -> retrieving, retriev, retrieve."""
    yield word
    if word.endswith("ies"):
        yield word[:-3] + "y"
    for ending in ("es", "s", "ing", "d", "ed"):
        if word.endswith(ending) and len(word) > len(ending) + 2:
            yield word[: -len(ending)]
            yield word[: -len(ending)] + "e"


Schema = dict[str, object]


def properties_of(schema: Schema) -> dict[str, Schema]:
    """The schemas of an object's properties; {} for what is none."""
    properties = schema.get("properties")
    named = cast(dict[str, object], properties) if isinstance(properties, dict) else {}
    return {name: cast(Schema, item) if isinstance(item, dict) else {} for name, item in named.items()}


@dataclass(frozen=True)
class ServerTool:
    """One tool of one server, under the server's own name."""

    server: str
    name: str
    description: str
    input_schema: Schema = field(hash=False)
    kind: ToolKind = ToolKind.UNKNOWN
    read_only: bool = False  # its annotation or the user says so; `kind` may also come from its words
    open_world: bool = False  # depends on the outside world, so its results change over time
    needs_task: bool = False  # can only be called as an MCP task, which is not supported


@dataclass(frozen=True)
class ServerDescription:
    """A server's identity and offers, as it reported them at the start."""

    name: str
    title: str | None
    version: str | None
    protocol: str
    tools: tuple[ServerTool, ...]
    faulty: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)  # what is wrong, by unusable tool

    @property
    def read_only(self) -> bool:
        """Whether annotations or the user say that every tool only reads, so that rollouts can share the server."""
        return all(tool.read_only for tool in self.tools)


def as_server_tool(server: str, tool: types.Tool, *, read_only: bool = False) -> ServerTool:
    """Convert a tool of the SDK. `read_only`: the user says that all tools of the server only read."""
    hints = tool.annotations
    execution = tool.execution
    description = tool.description or tool.title or ""
    return ServerTool(
        server=server,
        name=tool.name,
        description=description,
        input_schema=tool.input_schema,
        kind=ToolKind.READ if read_only else suggested_kind(tool.name, description, hints),
        read_only=read_only or bool(hints and hints.read_only_hint),
        open_world=bool(hints and hints.open_world_hint),
        needs_task=bool(execution and execution.task_support == "required"),
    )


def named(tools: Mapping[str, ServerTool], wanted: Iterable[str], option: str) -> frozenset[str]:
    """The names, as the model has them, of the tools that an option names. `tools` has the tools by these names.

    The option may say `tool`, `server.tool`, or the model's `shop_search`. Raises ConfigError for an unknown name.
    """
    spellings = {name: {name, tool.name, f"{tool.server}.{tool.name}"} for name, tool in tools.items()}
    wanted = set(wanted)
    if unknown := wanted.difference(*spellings.values()):
        raise ConfigError(f"{option}: there is no tool {min(unknown)!r}; the tools are {', '.join(tools)}")
    return frozenset(name for name, known in spellings.items() if known & wanted)


def signature(tool: ServerTool, folder: str | None = None) -> str:
    """The parts of a tool that callers depend on, as one text: name, description and input schema.

    The rollout's `folder`, which some servers put into descriptions, is replaced by its placeholder.
    """
    text = json.dumps([tool.name, tool.description, tool.input_schema], sort_keys=True)
    return text if folder is None else text.replace(json.dumps(folder)[1:-1], ROLLOUT_DIR)


def fingerprint(servers: Iterable[ServerDescription], folder: str | None = None) -> str:
    """A hash of the servers' names, versions and tool signatures: 16 hex digits of a SHA-256."""
    facts = [[server.title, server.version, [signature(tool, folder) for tool in server.tools]] for server in servers]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
