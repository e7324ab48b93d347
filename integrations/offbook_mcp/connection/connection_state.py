"""The state of a connection beside its messages: why it ended, and what the server wrote to stderr."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from offbook.base.redaction import error_text
from offbook.base.text import one_line, printable
from offbook_mcp.errors import McpServerError

from .environment_references import without

_TAIL_BYTES = 8_192
_TAIL_LINES = 15


@dataclass
class Link:
    """The state of one connection to one server. `closed` is set when no further response can come."""

    server: str
    secrets: tuple[str, ...] = field(default=(), repr=False)
    fault: McpServerError | None = None  # why the connection ended, if the transport knows more than the SDK
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    ending: str | None = None  # "exit code 1", once the process has ended
    http_error: str | None = None  # the last one, such as "HTTP 401 Unauthorized"
    stray_line: str | None = None  # the last line on stdout that was not a message
    faulty_tools: dict[str, str] = field(default_factory=dict[str, str])  # name -> what is wrong with its definition
    _stderr: bytearray = field(default_factory=bytearray)

    def fail(self, fault: McpServerError) -> None:
        """Record why the connection ends; the first reason wins."""
        self.fault = self.fault or fault
        self.closed.set()

    def add_stderr(self, chunk: bytes) -> None:
        """Append a chunk of the server's stderr; only the end is kept."""
        self._stderr += chunk
        del self._stderr[:-_TAIL_BYTES]

    @property
    def stderr(self) -> str:
        """The end of what the server wrote to stderr."""
        return self._stderr.decode("utf-8", "replace")

    def reason(self, error: BaseException | None = None) -> str:
        """Why the connection ended, as one printable clause."""
        if self.ending is not None:
            return f"the process ended ({self.ending})"
        if self.http_error is not None:
            return self.clean(self.http_error)
        return self.clean(error_text(error)) if error is not None else "the connection closed"

    def details(self) -> str:
        """Text that helps to find the cause: a stray line on stdout, and the end of stderr. Empty, or begins with `;`."""
        text = ""
        if self.stray_line is not None:
            text += f"; its stdout has lines that are not MCP messages, such as {self.clean(self.stray_line)!r}"
        if lines := [line for line in self.stderr.splitlines() if line.strip()][-_TAIL_LINES:]:
            text += "; the end of its stderr:\n" + printable(without("\n".join(lines), self.secrets))
        return text

    def clean(self, text: str) -> str:
        """A server's text on one line, printable and without secrets."""
        return one_line(without(text, self.secrets))
