"""Choices of chat completions, as objects of the OpenAI SDK or of litellm."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from pydantic import BaseModel

if TYPE_CHECKING:  # importing openai takes half a second, and records have none of its objects
    from openai.types.chat import ChatCompletionMessageParam
    from openai.types.chat.chat_completion import Choice

MARK = "offbook"
"""Field of a choice that identifies its recorded call: {trajectory_id, call_id, index, step}."""
OTHERS = "provider_specific_fields"
"""Where litellm keeps fields that OpenAI's format does not have, among them MARK."""


def is_choice(item: object) -> TypeGuard[Choice]:
    """Whether it is a choice of the SDK. False without an import of openai: nobody can have one yet."""
    module = sys.modules.get("openai.types.chat.chat_completion")
    return module is not None and isinstance(item, module.Choice)


def choice_of(fields: Mapping[str, Any]) -> Choice:
    """A choice of the SDK from its fields. Imports openai. Raises pydantic.ValidationError."""
    from openai.types.chat.chat_completion import Choice

    return Choice.model_validate(fields)


def as_choice(item: object) -> Choice | None:
    """An SDK choice: `item` itself, or a copy of litellm's `Choices`. None for anything else, such as a message.

    litellm is not imported: its choice is recognized by its fields."""
    if is_choice(item):
        return item
    if not isinstance(item, BaseModel) or not hasattr(item, "message") or not hasattr(item, "finish_reason"):
        return None
    fields: dict[str, Any] = item.model_dump(exclude_none=True)
    message = {name: value for name, value in fields["message"].items() if name != OTHERS}
    return choice_of({**fields, "message": message})


def as_entry(item: object) -> Choice | dict[str, Any]:
    """A choice, or a message as its dict. A dict with the fields of a choice becomes a choice again. Raises ValueError
    for anything else."""
    choice = as_choice(item)
    if choice is not None:
        return choice
    if not isinstance(item, dict):
        raise ValueError(f"a message is a dict, got {type(item).__name__} {item!r:.80}")
    message = cast(dict[str, Any], item)
    return choice_of(message) if {"message", "finish_reason"} <= message.keys() else message


def mark_of(choice: Choice) -> Mapping[str, object] | None:
    """The mark of a recorded call; None for a choice without one."""
    fields = choice.model_extra or {}
    others = fields.get(OTHERS)
    mark = fields.get(MARK) or (cast(dict[str, object], others).get(MARK) if isinstance(others, dict) else None)
    return cast(dict[str, object], mark) if isinstance(mark, dict) and "call_id" in mark else None


def as_message(item: object) -> ChatCompletionMessageParam:
    """A choice or message as a plain message. Reasoning and tool calls are kept; null fields are left out.

    >>> from openai.types.chat.chat_completion import Choice
    >>> message = {"role": "assistant", "content": "Hello.", "refusal": None}
    >>> as_message(Choice.model_validate({"index": 0, "finish_reason": "stop", "message": message}))
    {'content': 'Hello.', 'role': 'assistant'}
    """
    choice = as_choice(item)
    if choice is not None:
        message = choice.message.model_dump(exclude_none=True)
        message.setdefault("content", None if message.get("tool_calls") else "")
        return message  # type: ignore[return-value]  # the SDK's own dump of its own message
    return item  # type: ignore[return-value]
