"""Stands for `art.utils.litellm`."""

from __future__ import annotations

from openai.types.chat.chat_completion import Choice

from offbook.base.choices import as_choice
from offbook.base.errors import ConfigError


def convert_litellm_choice_to_openai(litellm_choice: object) -> Choice:
    """The same choice as the OpenAI SDK's, with the mark of its call. `messages_and_choices` takes litellm's own too."""
    choice = as_choice(litellm_choice)
    if choice is None:
        raise ConfigError(f"litellm_choice: a choice of a finished answer is needed, got {litellm_choice!r:.200}")
    return choice
