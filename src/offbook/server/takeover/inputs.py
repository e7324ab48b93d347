"""What the calls of an app looked like: the names of their tools, the longest, and the words of users. A call that is unlike
them has drifted.

Also whether a tool of the app has failed, as its result in a call says it."""

from __future__ import annotations

from typing import cast

import orjson
from pydantic import BaseModel, Field, ValidationError

from offbook.base.takeovers import TakeoverState
from offbook.base.types import Json
from offbook.openai_dialect.chat_answer import Answer

from .words import SeenWords

LONGER = 1.5
"""A call may be longer than all that were seen by this factor."""
FEW = 30
"""Calls until anything is unlike them."""


class SeenInputs(BaseModel):
    """The calls that the small model was tried on: in shadow, else those of the paid model; after a short
    shadow also the next ones, up to FEW. No text is kept."""

    calls: int = 0
    longest: int = 0
    tools: set[str] = Field(default_factory=set)
    words: SeenWords = Field(default_factory=SeenWords)

    def learn(self, body: Answer, size: int) -> None:
        """Take in a call of `size` bytes."""
        self.calls += 1
        self.longest = max(self.longest, size)
        self.tools |= tool_names(body)
        if (text := new_input(body)) is not None:
            self.words.learn(text)

    @property
    def few(self) -> bool:
        """Whether too few were seen to call another unlike them."""
        return self.calls < FEW

    def unlike(self, body: Answer, size: int) -> str | None:
        """How a call differs from those that were seen: "new tools", "longer" or "new words"; None if it does not."""
        if self.few:
            return None
        if tool_names(body) - self.tools:
            return "new tools"
        if size > LONGER * self.longest:
            return "longer"
        text = new_input(body)
        return "new words" if text is not None and self.words.strange(text) else None


def stored_takeover(text: str) -> tuple[TakeoverState, SeenInputs] | None:
    """The state and the inputs of a stored text; None for one that does not read back."""
    state, _, seen = text.partition("\n")
    try:
        return TakeoverState.model_validate_json(state), SeenInputs.model_validate_json(seen)
    except ValidationError:
        return None


def tool_names(body: Answer) -> set[str]:
    """The names of the tools that a request of any API offers."""
    tools = _objects(body.get("tools"))
    parts = [
        *tools,
        *(part for tool in tools for name in ("function", "functionDeclarations") for part in _objects(tool.get(name))),
    ]
    return {name for part in parts if isinstance(name := part.get("name"), str)}


def new_input(body: Answer) -> str | None:
    """The text of the user's message that a request of any API ends with; None if it ends with another, as after a tool's result."""
    turns: Json = body.get("messages") or body.get("contents") or body.get("input")
    if isinstance(turns, str):
        return turns
    newest = (_objects(turns) or [{}])[-1]
    if newest.get("role") != "user":
        return None
    content = newest.get("content") or newest.get("parts")
    if isinstance(content, str):
        return content
    texts = [part["text"] for part in _objects(content) if isinstance(part.get("text"), str)]
    return " ".join(texts) if texts else None


def failed_results(body: Answer) -> list[bool]:
    """For each result of a tool that a request of any API brings since the last answer: whether it says that the tool failed.

    It says so by `is_error`, as Anthropic's API has it, by a text that begins with "Error", as LangGraph's tools write it, or
    by a JSON object with a true `error` or `isError`.
    """
    results: list[bool] = []
    for turn in reversed(_objects(body.get("messages") or body.get("contents") or body.get("input"))):
        if turn.get("role") == "tool" or turn.get("type") == "function_call_output":
            results.append(_failed(turn.get("content") or turn.get("output")))
            continue
        for part in _objects(turn.get("parts") or turn.get("content")):
            if "functionResponse" in part:
                results += [_failed(each.get("response")) for each in _objects(part["functionResponse"])]
            elif part.get("type") == "tool_result":
                results.append(part.get("is_error") is True or _failed(part.get("content")))
        break
    return results


def _failed(result: Json) -> bool:
    """Whether the result of a tool says that it failed: a text, its parts, or an object."""
    if isinstance(result, list):
        return any(_failed(part.get("text")) for part in _objects(result))
    if isinstance(result, str) and result.lstrip().startswith("{"):
        try:
            result = orjson.loads(result)
        except orjson.JSONDecodeError:
            return False
    if isinstance(result, dict):
        told = cast(dict[str, Json], result)
        return bool(told.get("error") or told.get("isError"))
    return isinstance(result, str) and result.lstrip().startswith("Error")


def _objects(value: Json) -> list[dict[str, Json]]:
    """The objects of a JSON list, or the object itself; other values have none."""
    items = cast(list[Json], value) if isinstance(value, list) else [value]
    return [cast(dict[str, Json], item) for item in items if isinstance(item, dict)]
