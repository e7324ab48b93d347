"""The inverse of a judge's prompt: for scripted judges in tests and benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from understudy.types import Message, Tool

from .judge_prompt import SHARED
from .transcripts import TOOLS

_OPENS = re.compile(r"\[([a-z0-9]{10}) (?:(shared beginning)|attempt (\w+)|sub-agent \d+ of attempt (\w+))\]")


@dataclass
class ShownConversation:
    """A conversation as it stands in a prompt."""

    messages: list[Message] = field(default_factory=list[Message])
    tools: list[Tool] | None = None


def attempts_shown(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[ShownConversation]]:
    """The attempts of a judge's prompt by id, in the order shown: each one's own conversation, whole, then its sub-agents'."""
    shared: list[str] = []
    attempts: dict[str, list[ShownConversation]] = {}
    lines = iter(str(messages[1]["content"]).split("\n"))
    for line in lines:
        opened = _OPENS.fullmatch(line)
        if opened is None:
            continue
        mark, begins, own, owner = opened.groups()
        inside: list[str] = []
        while (line := next(lines)) != f"[{mark} end]":
            inside.append(line)
        if begins == SHARED:
            shared = inside
        else:
            attempts.setdefault(own or owner, []).append(_conversation(shared + inside if own else inside))
    return attempts


def _conversation(lines: Sequence[str]) -> ShownConversation:
    shown = ShownConversation()
    for line in lines:
        if line.startswith(TOOLS):
            shown.tools = json.loads(line.removeprefix(TOOLS))
        else:
            shown.messages.append(json.loads(line))
    return shown
