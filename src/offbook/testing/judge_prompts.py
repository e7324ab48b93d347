"""A scripted RULER judge: read the attempts in a judge's prompt, and reply with a score for each."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offbook.base.types import Message, Tool
from offbook.rewards.judge_prompt import SHARED
from offbook.rewards.transcripts import TOOLS

from .replies import LlmReply, LlmRequest, says

_OPENS = re.compile(r"\[([a-z0-9]{10}) (?:(shared beginning)|attempt (\w+)|sub-agent \d+ of attempt (\w+))\]")


@dataclass
class ShownConversation:
    """A conversation as it stands in a judge's prompt. `tools`: None where the prompt names none.

    conversation.messages[-1]["content"]  # the attempt's answer
    """

    messages: list[Message] = field(default_factory=list[Message])
    tools: list[Tool] | None = None


def attempts_shown(messages: Sequence[Mapping[str, Any]]) -> dict[str, list[ShownConversation]]:
    """The attempts of a judge's prompt by id, in the order shown: each one's own conversation, whole, then its sub-agents'.

    attempts_shown(endpoint.requests[0].messages)

    {} for a prompt that is none of RULER's."""
    shared: list[str] = []
    attempts: dict[str, list[ShownConversation]] = {}
    prompt = str(messages[1]["content"]) if len(messages) > 1 else ""
    lines = iter(prompt.split("\n"))
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


def judges(
    request: LlmRequest, score: Callable[[list[ShownConversation]], float], *, explanation: str = "scripted"
) -> LlmReply:
    """The reply of a RULER judge: a score for each attempt that the request shows, under the ids that it was shown with.

        def short(conversations):
            return 1.0 if len(conversations[0].messages[-1]["content"]) < 80 else 0.2

        with scripted_llm(lambda request: judges(request, short)) as endpoint:
            judge = offbook.Ruler("openai/judge", api_base=endpoint.url, api_key="unused", cache=None)

    `score`: from an attempt's conversations, as of `attempts_shown`, to a number from 0 to 1. `explanation`: of each score.
    Raises ValueError for a request that is no prompt of RULER's."""
    attempts = attempts_shown(request.messages)
    if not attempts:
        raise ValueError(f"the request shows no attempts, so it is no prompt of RULER's: {request.messages!r}")
    scores = [{"id": id, "explanation": explanation, "score": score(attempt)} for id, attempt in attempts.items()]
    return says(json.dumps({"scores": scores}))


def _conversation(lines: Sequence[str]) -> ShownConversation:
    shown = ShownConversation()
    for line in lines:
        if line.startswith(TOOLS):
            shown.tools = json.loads(line.removeprefix(TOOLS))
        else:
            shown.messages.append(json.loads(line))
    return shown
