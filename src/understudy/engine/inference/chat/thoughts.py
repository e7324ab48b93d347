"""A model's thoughts apart from its answer: `<think>...</think>` at the beginning of what it writes.

Where the prompt opens the thought already, the text begins inside it. A text that begins with anything else is answer from its
first character. Whole or in pieces, the same text gives the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OPEN = "<think>"
CLOSE = "</think>"
_LINES = "\r\n"


@dataclass(frozen=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


class ThoughtSplitter:
    """Splits text into thought and answer. Line ends around the thought, which templates write, belong to neither.

    `inside`: the text begins within a thought that the prompt opened.
    """

    def __init__(self, *, inside: bool = False) -> None:
        self._at: Literal["start", "thought", "gap", "answer"] = "thought" if inside else "start"
        self._buffer = ""
        self._begun = False

    @property
    def answering(self) -> bool:
        """Whether the answer has begun."""
        return self._at == "answer"

    def push(self, text: str) -> tuple[str, str]:
        """The thought and the answer that are certain after this piece of text."""
        self._buffer += text
        if self._at == "start":
            self._start()
        thought = self._thought() if self._at == "thought" else ""
        if self._at == "gap" and (answer := self._buffer.lstrip(_LINES)):
            self._at, self._buffer = "answer", answer
        if self._at != "answer":
            return thought, ""
        answer, self._buffer = self._buffer, ""
        return thought, answer

    def finish(self) -> tuple[str, str]:
        """The rest. A thought that is not closed stays a thought."""
        rest, self._buffer = self._buffer, ""
        return (rest.strip(_LINES), "") if self._at == "thought" else ("", "") if self._at == "gap" else ("", rest)

    def _start(self) -> None:
        text = self._buffer.lstrip()
        if text.startswith(OPEN):
            self._at, self._buffer = "thought", text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._at = "answer"

    def _thought(self) -> str:
        """The part of the thought that is certain: line ends at its end, and what may be the closing tag, wait."""
        if not self._begun:
            self._buffer = self._buffer.lstrip(_LINES)
        inner, close, after = self._buffer.partition(CLOSE)
        if close:
            self._at, self._buffer = "gap", after
            return inner.rstrip(_LINES)
        sure = len(self._buffer) - _waiting(self._buffer)
        thought, self._buffer = self._buffer[:sure], self._buffer[sure:]
        self._begun |= bool(thought)
        return thought


def _waiting(text: str) -> int:
    """How many last characters may be line ends before the closing tag, or its beginning."""
    tag = next((size for size in range(min(len(CLOSE) - 1, len(text)), 0, -1) if CLOSE.startswith(text[-size:])), 0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip(_LINES))
