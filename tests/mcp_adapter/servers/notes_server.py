"""A server of one's own, in process: notes, in memory or in a rollout's folder."""

from __future__ import annotations

from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations


def make(folder: Path | None = None) -> MCPServer:
    """A new server whose notes are those of the folder, one file each."""
    server = MCPServer("notes")
    notes = {file.stem: file.read_text() for file in folder.glob("*.txt")} if folder else {}

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def read_note(name: str) -> str:
        """The text of a note."""
        return notes[name]

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def list_notes() -> list[str]:
        """The names of the notes."""
        return sorted(notes)

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=False))
    def write_note(name: str, text: str) -> str:
        """Writes a note."""
        notes[name] = text
        return f"wrote {name}"

    @server.resource("notes://count")
    def count() -> str:
        """How many notes there are."""
        return f"{len(notes)} notes"

    @server.prompt()
    def summary(name: str) -> str:
        """Asks for a summary of a note."""
        return f"Summarise the note {name}."

    return server


server = make()
