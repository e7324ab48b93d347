"""Separates a model's thought, `<think>...</think>` at the beginning of its text, from its answer.

If the prompt opens the thought, the text begins inside it. A text that begins with anything else is all answer. How the
text is divided into pieces does not affect the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OPEN = "<think>"
CLOSE = "</think>"
_LINES = "\r\n"


@dataclass(frozen=True)
class Thought:
    """A piece of a thought."""

    text: str


class ThoughtSplitter:
    """Splits text into thought and answer. Line ends around the thought belong to neither, because templates add them.

    `inside`: the text begins inside a thought that the prompt opened.

    >>> splitter = ThoughtSplitter()
    >>> splitter.push("<think>2 + 2"), splitter.push(" = 4</think>\\n\\n4")
    (('2 + 2', ''), (' = 4', '4'))
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._state: Literal["start", "thought", "gap", "answer"] = "thought" if inside else "start"
        self._buffer = ""
        self._has_text = False

    @property
    def answering(self) -> bool:
        """Whether the answer has begun."""
        return self._state == "answer"

    def push(self, text: str) -> tuple[str, str]:
        """Add a piece of text, and return the parts of thought and answer that are final."""
        self._buffer += text
        if self._state == "start":
            self._start()
        thought = self._thought() if self._state == "thought" else ""
        if self._state == "gap" and (answer := self._buffer.lstrip(_LINES)):
            self._state, self._buffer = "answer", answer
        if self._state != "answer":
            return thought, ""
        answer, self._buffer = self._buffer, ""
        return thought, answer

    def finish(self) -> tuple[str, str]:
        """End the text, and return what is left. A thought that is not closed stays a thought."""
        rest, self._buffer = self._buffer, ""
        return (
            (rest.strip(_LINES), "") if self._state == "thought" else ("", "") if self._state == "gap" else ("", rest)
        )

    def _start(self) -> None:
        text = self._buffer.lstrip()
        if text.startswith(OPEN):
            self._state, self._buffer = "thought", text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._state = "answer"

    def _thought(self) -> str:
        """The final part of the thought. Line ends and the possible beginning of the closing tag stay in the buffer."""
        if not self._has_text:
            self._buffer = self._buffer.lstrip(_LINES)
        inner, close, after = self._buffer.partition(CLOSE)
        if close:
            self._state, self._buffer = "gap", after
            return inner.rstrip(_LINES)
        final = len(self._buffer) - _waiting(self._buffer)
        thought, self._buffer = self._buffer[:final], self._buffer[final:]
        self._has_text |= bool(thought)
        return thought


def _waiting(text: str) -> int:
    """Number of last characters that could be the beginning of the closing tag, or line ends before it."""
    tag = next((size for size in range(min(len(CLOSE) - 1, len(text)), 0, -1) if CLOSE.startswith(text[-size:])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip(_LINES))
