"""What the calls of an app looked like: the names of their tools, and the longest. A call that is unlike them has drifted."""

from __future__ import annotations

from typing import cast

from pydantic import BaseModel, Field

from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer

LONGER = 1.5
"""A call may be longer than all that were seen by this factor."""
FEW = 30
"""Calls until anything is unlike them."""


class SeenInputs(BaseModel):
    """The calls that the small model was tried on: in shadow, else those of the paid model. No text is kept."""

    calls: int = 0
    longest: int = 0
    tools: set[str] = Field(default_factory=set)

    def learn(self, body: Answer, size: int) -> None:
        """Take in a call of `size` bytes."""
        self.calls += 1
        self.longest = max(self.longest, size)
        self.tools |= tool_names(body)

    def unlike(self, body: Answer, size: int) -> str | None:
        """How a call differs from those that were seen: "new tools" or "longer"; None if it does not."""
        if self.calls < FEW:
            return None
        if tool_names(body) - self.tools:
            return "new tools"
        return "longer" if size > LONGER * self.longest else None


def tool_names(body: Answer) -> set[str]:
    """The names of the tools that a request of any API offers."""
    tools = _objects(body.get("tools"))
    parts = [
        *tools,
        *(part for tool in tools for name in ("function", "functionDeclarations") for part in _objects(tool.get(name))),
    ]
    return {name for part in parts if isinstance(name := part.get("name"), str)}


def _objects(value: Json) -> list[dict[str, Json]]:
    """The objects of a JSON list, or the object itself; other values have none."""
    items = cast(list[Json], value) if isinstance(value, list) else [value]
    return [cast(dict[str, Json], item) for item in items if isinstance(item, dict)]
