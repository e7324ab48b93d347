"""Prompts from Langfuse's prompt management, by name and version, noted on the rollouts that use them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import quote

from offbook import current_trajectory
from offbook.base.errors import ConfigError
from offbook.base.types import Json, Message

from .connection import LangfuseConnection, LangfuseRest

_VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")


@dataclass(frozen=True)
class ManagedPrompt:
    """A version of a prompt: a text, or chat messages."""

    name: str
    version: int
    prompt: str | tuple[Message, ...]
    config: Mapping[str, Json]

    def compile(self, **variables: object) -> str | list[Message]:
        """The prompt with its `{{variables}}` filled in, noted on the rollout that runs here. Raises ConfigError for one
        that is missing."""
        trajectory = current_trajectory()
        if trajectory is not None:
            trajectory.metadata["prompt"] = f"{self.name}@{self.version}"
        if isinstance(self.prompt, str):
            return self._filled(self.prompt, variables)
        return [{**each, "content": self._filled(str(each.get("content", "")), variables)} for each in self.prompt]

    def _filled(self, text: str, variables: Mapping[str, object]) -> str:
        missing = sorted(set(_VARIABLE.findall(text)) - set(variables))
        if missing:
            raise ConfigError(f"prompt {self.name!r} version {self.version}: no value for {', '.join(missing)}")
        return _VARIABLE.sub(lambda found: str(variables[found[1]]), text)


def managed_prompt(
    name: str, *, version: int | None = None, label: str | None = None, connection: LangfuseConnection | None = None
) -> ManagedPrompt:
    """A prompt by version, by label, or the one labelled `production`. Raises ConfigError for one that does not exist."""
    if version is not None and label is not None:
        raise ConfigError(f"prompt {name!r}: give a version or a label, not both")
    with LangfuseRest(connection or LangfuseConnection.from_environment()) as rest:
        found = rest.get(f"/api/public/v2/prompts/{quote(name, safe='')}", {"version": version, "label": label})
    text: Json = found.get("prompt")
    number: Json = found.get("version")
    config: Json = found.get("config") or {}
    messages = cast(Sequence[Json], text if isinstance(text, list) else ())
    whole = isinstance(text, str) or (isinstance(text, list) and all(isinstance(each, dict) for each in messages))
    if not whole or not isinstance(number, int) or not isinstance(config, dict):
        raise ConfigError(f"Langfuse answered the prompt {name!r} with no prompt: {dict(found)!r:.300}")
    prompt = text if isinstance(text, str) else tuple(cast(Sequence[Message], messages))
    return ManagedPrompt(str(found.get("name", name)), number, prompt, cast(Mapping[str, Json], config))
