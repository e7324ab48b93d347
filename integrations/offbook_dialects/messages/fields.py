"""The fields of Anthropic's Messages API, and the tools that Anthropic defines and its client runs: functions whose schema the
client leaves out, since Claude knows it.

https://docs.anthropic.com/en/api/messages and, for names, fields and versions of the tools,
https://platform.claude.com/docs/en/agents-and-tools/tool-use/tool-reference.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from offbook.base.types import Json


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Text(_Part):
    """Text."""

    type: Literal["text"]
    text: str


class Source(_Part):
    """The source of an image or a document."""

    type: Literal["base64", "url", "text"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Image(_Part):
    """An image."""

    type: Literal["image"]
    source: Source


class Document(_Part):
    """A document."""

    type: Literal["document"]
    source: Source


class ToolReference(_Part):
    """The name of a deferred tool that a search found."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolResultBlock(_Part):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[Text | Image | ToolReference, Field(discriminator="type")]] | None = None
    is_error: bool | None = None


class ToolUseBlock(_Part):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Json]


class Thinking(_Part):
    """A thought."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(_Part):
    """A thought of another model, which nobody here can read."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Text | Image | Document | ToolResultBlock | ToolUseBlock | Thinking | RedactedThinking, Field(discriminator="type")
]


class Turn(_Part):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(_Part):
    """A tool. Those without `input_schema` are Anthropic's own, with options of their own; sets of them have no name."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Json] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoice(_Part):
    """Which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOption(_Part):
    """Whether the model thinks. Its budget is not kept."""

    type: str


class OutputFormat(_Part):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Json] = Field(alias="schema")


class OutputConfig(_Part):
    """The form of the answer, and how much the model thinks."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(_Part):
    """A request for an answer, or for the number of tokens of its prompt."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    model: str | None = None
    messages: list[Turn] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOption | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None


WITHOUT_EFFECT = frozenset(
    {
        "betas",
        "cache_control",
        "context_management",
        "diagnostics",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "metadata",
        "service_tier",
        "speed",
        "user_profile_id",
    }
)
"""Fields that concern Anthropic's own service."""
REFUSED = {
    "container": "nothing is executed here; offer a tool instead",
    "thread": "no conversation is kept here; send all of its messages",
    "mcp_servers": "the endpoint calls no tools; let the client connect to the MCP server",
}
NO_THREADS = "thread_unsupported_request"
"""Anthropic's code for a refused `thread`: its SDK's tool runner then sends all messages itself."""


_KIND = re.compile(r"(bash|text_editor|memory|computer)_(\d{8})")
_AT_ANTHROPIC = ("web_search", "web_fetch", "code_execution", "tool_search_tool", "advisor", "mcp_toolset")
_TEXT: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_POINT: Json = {"type": "array", "items": _INTEGER, "minItems": 2, "maxItems": 2}
_EDITS: dict[str, Json] = {
    "path": _TEXT,
    "view_range": {**_POINT, "description": "for view: first and last line, from 1; -1 is the last one"},
    "file_text": {**_TEXT, "description": "for create: the whole file"},
    "old_str": {**_TEXT, "description": "for str_replace: the text to replace, which must occur exactly once"},
    "new_str": {**_TEXT, "description": "for str_replace: the text instead"},
    "insert_line": {**_INTEGER, "description": "for insert: the line after which the text is inserted; 0 is the start"},
}
_INSERTED: Json = {**_TEXT, "description": "for insert: the text"}
_CLICKS = ["left_click", "right_click", "middle_click", "double_click"]
_FIRST = ["screenshot", "cursor_position", "mouse_move", *_CLICKS, "left_click_drag", "type", "key"]
_SECOND = ["triple_click", "left_mouse_down", "left_mouse_up", "scroll", "hold_key", "wait"]


def client_tool(kind: str, options: dict[str, Json]) -> tuple[str, Json] | None:
    """The description and the schema of a tool by its type, such as `bash_20250124`; None for a type of another kind."""
    match = _KIND.fullmatch(kind)
    if match is None:
        return None
    version = int(match[2])
    match match[1]:
        case "bash":
            text = "Runs commands in a shell that keeps its state. `restart` starts a new one."
            return text, _object({"command": _TEXT, "restart": {"type": "boolean"}})
        case "text_editor":
            return "Shows, creates and changes text files.", _editor(version)
        case "memory":
            text = "Keeps notes between conversations, as files below /memories."
            renamed = {"old_path": {**_TEXT, "description": "for rename"}, "new_path": _TEXT}
            commands = ["view", "create", "str_replace", "insert", "delete", "rename"]
            return text, _commands(commands, {**_EDITS, "insert_text": _INSERTED, **renamed})
        case _:
            width, height = options.get("display_width_px"), options.get("display_height_px")
            text = f"Sees and controls a screen of {width} x {height} pixels. Coordinates are (x, y) from the top left."
            return text, _computer(version, zoom=bool(options.get("enable_zoom")))


def refused(kind: str) -> str:
    """Why a tool without a schema is refused."""
    if kind.startswith(_AT_ANTHROPIC):
        return f"{kind!r} runs on Anthropic's servers: offer a tool with an input_schema instead"
    known = "bash_, text_editor_, memory_ and computer_ with a date"
    return f"{kind!r} has no input_schema: add one, or use a type whose schema is known here ({known})"


def _object(properties: dict[str, Json], *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _commands(names: list[str], properties: dict[str, Json], *required: str) -> Json:
    return _object({"command": {"type": "string", "enum": names}, **properties}, "command", *required)


def _editor(version: int) -> Json:
    """Up to the version of Claude 3.7 edits can be undone; from July 2025 on the text to insert has a field of its own."""
    undo = ["undo_edit"] if version < 20250429 else []
    own: dict[str, Json] = {"insert_text": _INSERTED}
    if version < 20250728:
        own = {"new_str": {**_TEXT, "description": "for str_replace: the text instead; for insert: the text"}}
    return _commands(["view", "create", "str_replace", "insert", *undo], {**_EDITS, **own}, "path")


def _computer(version: int, *, zoom: bool) -> Json:
    actions = _FIRST if version < 20250124 else [*_FIRST, *_SECOND]
    fields: dict[str, Json] = {
        "coordinate": {**_POINT, "description": "where to click, move or scroll, or the end of a drag"},
        "text": {**_TEXT, "description": "for type: the text; for key and hold_key: the keys, such as ctrl+s"},
    }
    if version >= 20250124:
        fields |= {
            "start_coordinate": {**_POINT, "description": "for left_click_drag"},
            "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
            "scroll_amount": {**_INTEGER, "description": "for scroll: clicks of the wheel"},
            "duration": {"type": "number", "description": "for hold_key and wait: seconds"},
        }
    if zoom and version >= 20251124:
        region: Json = {"type": "array", "items": _INTEGER, "minItems": 4, "maxItems": 4}
        fields["region"] = {**region, "description": "for zoom: x and y of two corners"}
        actions = [*actions, "zoom"]
    return _object({"action": {"type": "string", "enum": actions}, **fields}, "action")
