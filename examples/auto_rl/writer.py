"""The LLM by script, behind an OpenAI-compatible URL: it writes the task, inputs, prompt and rubric, and judges answers."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from offbook.testing import LlmReply, LlmRequest, ShownConversation, attempts_shown, judges, says

DESCRIPTION = "answer a question about a train with the one call that looks it up"
TOOLS_OF = {
    "track": ("train_track", ("where does {} leave?", "where do I find {}?")),
    "delay": ("train_delay", ("is {} on time?", "how late is {}?")),
    "length": ("train_length", ("how many cars has {}?", "who can sit in {}?")),
}
"""What is asked -> the tool that answers, and questions. None names a tool."""
MANNERS = {
    "plain": "{}",
    "polite": "please, {}",
    "greeting": "hello, {}",
    "thankful": "{} thanks",
    "asking": "can you say, {}",
    "needing": "{} I need to know",
    "hasty": "quick question, {}",
    "urgent": "{} it is urgent",
    "again": "we ask again, {}",
    "lost": "I am new here, {}",
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {asked} of a train.",
            "parameters": {"type": "object", "properties": {"train": {"type": "string"}}, "required": ["train"]},
        },
    }
    for asked, (name, _) in TOOLS_OF.items()
]
RUBRIC = (
    "The answer is one call.",
    "The call names the tool that looks up what is asked.",
    "Its argument is the number of the train.",
    "It has no other argument.",
)
_LINE = re.compile(r"^(\d+)\. difficulty \d; (.*)$", re.MULTILINE)


def reply(request: LlmRequest) -> LlmReply:
    asked = str(request.messages[-1]["content"])
    if attempts_shown(request.messages):
        return judges(request, score)
    if "name the dimensions" in asked:
        dimensions = [{"name": "asked", "values": [*TOOLS_OF]}, {"name": "manner", "values": [*MANNERS]}]
        return says(json.dumps({"inputs": "a question about one train", "dimensions": dimensions}))
    if "one for each line below" in asked:
        return says(json.dumps({"inputs": inputs(asked)}))
    if "Write the system prompt" in asked:
        return says(json.dumps({"prompt": "Answer with one call."}))
    return says(json.dumps({"criteria": RUBRIC}))


def inputs(asked: str) -> list[dict[str, Any]]:
    """A question for each line of the request, the same for the same request."""
    numbers = random.Random(asked)
    written: list[dict[str, Any]] = []
    for number, values in _LINE.findall(asked):
        named = dict(pair.split(": ", 1) for pair in values.split("; "))
        question = numbers.choice(TOOLS_OF[named["asked"]][1]).format(f"train {numbers.randrange(1_000, 10_000)}")
        written.append({"number": int(number), "input": MANNERS[named["manner"]].format(question)})
    return written


def score(conversations: list[ShownConversation]) -> float:
    """1 for the right call, 0.3 for the right tool with another number, else 0."""
    messages = conversations[0].messages
    question = next(str(message["content"]) for message in messages if message["role"] == "user")
    calls = messages[-1].get("tool_calls") or []
    [wanted] = {name for name, words in TOOLS_OF.values() if any(_fits(each, question) for each in words)}
    if len(calls) != 1 or calls[0]["function"]["name"] != wanted:
        return 0.0
    number = re.search(r"train (\d+)", question)
    right = number is not None and calls[0]["function"]["arguments"] == json.dumps({"train": number[1]})
    return 1.0 if right else 0.3


def _fits(words: str, question: str) -> bool:
    return all(part in question for part in words.split("{}"))
