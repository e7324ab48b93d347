"""Tools that Anthropic defines and its client runs: functions whose schema the client leaves out, since Claude knows it.

Their names, fields and versions: https://platform.claude.com/docs/en/agents-and-tools/tool-use/tool-reference.
"""

from __future__ import annotations

import re

from offbook.base.types import Json

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
