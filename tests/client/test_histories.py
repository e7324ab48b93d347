"""Histories keep the messages that they were given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from openai.types.chat.chat_completion import Choice
from pydantic import ValidationError

from offbook import History, Trajectory

CALL = {"id": "a", "type": "function", "index": 0, "function": {"name": "look", "arguments": "{}"}}
MESSAGES: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": None, "reasoning_content": "think", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "none"},
]


def test_a_message_stays_as_it_is_however_often_it_is_read() -> None:
    trajectory = Trajectory(messages_and_choices=copy.deepcopy(MESSAGES))
    assert trajectory.messages() == trajectory.messages() == MESSAGES
    assert trajectory.model_copy(deep=True).model_dump(mode="json")["messages_and_choices"] == MESSAGES


def test_a_choice_comes_back_from_json_as_a_choice() -> None:
    choice = Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x"}}
    )
    history = History(messages_and_choices=[*MESSAGES, choice])
    assert History.model_validate_json(history.model_dump_json()) == history
    assert isinstance(History.model_validate(history.model_dump()).messages_and_choices[-1], Choice)


@pytest.mark.parametrize(
    ("items", "says"), [("hi", "a list of messages"), (["hi"], "a message is a dict, got str 'hi'")]
)
def test_what_is_no_message_is_refused(items: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        Trajectory(messages_and_choices=items)
