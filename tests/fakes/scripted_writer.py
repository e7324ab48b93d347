"""The LLM behind an AutoTrainer, by script: it writes requests to an order desk, and judges the calls that answer them.

One function for all its questions, as one LLM answers them: the outline, inputs, the system prompt, the rubric, RULER's.
The task is to pick the tool and its argument, which the bundled policy `tiny` can learn."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

from offbook.testing import LlmReply, LlmRequest, ShownConversation, attempts_shown, judges, says

DESCRIPTION = "answer a request to an order desk with the one call that looks it up"
WORDINGS = {
    "state of an order": ("order_status", ("has {order} left yet?", "is {order} on its way?")),
    "sum of an order": ("order_total", ("how much was {order}?", "what did we pay for {order}?")),
    "carrier of an order": ("order_carrier", ("who brings {order}?", "which van has {order}?")),
    "buyer of an order": ("order_customer", ("who bought {order}?", "whose is {order}?")),
}
"""Value of the dimension `asked` -> the tool that answers, and wordings."""
MANNERS = {
    "plain": "{}",
    "polite": "please, {}",
    "greeting": "hello, {}",
    "thankful": "{} thanks",
    "asking": "can you say, {}",
    "needing": "{} I need to know",
    "quick": "quick question, {}",
    "urgent": "{} it is urgent",
    "again": "we ask again, {}",
    "wondering": "{} we wonder",
}
"""Value of the dimension `manner` -> a sentence around the wording."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name.partition('_')[2]} of this order.",
            "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
        },
    }
    for name, _ in WORDINGS.values()
]
RUBRIC = ["The call names the tool that looks up what is asked.", "Its argument is the number of the order."]
_LINE = re.compile(r"^(\d+)\. difficulty (\d); (.*)$", re.MULTILINE)


def outline() -> LlmReply:
    dimensions = {"asked": list(WORDINGS), "manner": list(MANNERS)}
    listed = [{"name": name, "values": values} for name, values in dimensions.items()]
    return says(json.dumps({"inputs": "a question about one order, by its number", "dimensions": listed}))


def inputs(request: LlmRequest, seed: int) -> LlmReply:
    """One request for each line that the question lists; the same question always gets the same ones."""
    asked = str(request.messages[-1]["content"])
    draw = random.Random(f"{seed} {asked}")
    written: list[dict[str, Any]] = []
    for number, _, values in _LINE.findall(asked):
        named = dict(pair.split(": ", 1) for pair in values.split("; "))
        text = draw.choice(WORDINGS[named["asked"]][1]).format(order=f"order {draw.randint(1000, 9999)}")
        written.append({"number": int(number), "input": MANNERS[named["manner"]].format(text)})
    return says(json.dumps({"inputs": written}))


def score(conversations: list[ShownConversation]) -> float:
    """1 for the right tool and argument, 0.3 for the right tool alone, 0 for all else."""
    messages = conversations[0].messages
    question = next(str(message["content"]) for message in messages if message["role"] == "user")
    calls = messages[-1].get("tool_calls") or []
    if len(calls) != 1:
        return 0.0
    wanted = next(tool for tool, texts in WORDINGS.values() if any(_fits(text, question) for text in texts))
    called = calls[0]["function"]
    if called["name"] != wanted:
        return 0.0
    order = re.search(r"order (\d+)", question)
    right = order is not None and called["arguments"].strip() == json.dumps({"order": order[1]})
    return 1.0 if right else 0.3


def _fits(wording: str, question: str) -> bool:
    before, after = wording.split("{order}")
    return before in question and after.strip("?") in question


def writer(seed: int = 0, prompt: str = "Answer with one call.") -> Callable[[LlmRequest], LlmReply]:
    """The reply to every question of an AutoTrainer of this task."""

    def reply(request: LlmRequest) -> LlmReply:
        asked = str(request.messages[-1]["content"])
        if attempts_shown(request.messages):
            return judges(request, score)
        if "name the dimensions" in asked:
            return outline()
        if "one for each line below" in asked:
            return inputs(request, seed)
        if "Write the system prompt" in asked:
            return says(json.dumps({"prompt": prompt}))
        if "Write that rubric" in asked:
            return says(json.dumps({"criteria": RUBRIC}))
        raise AssertionError(f"no question of an AutoTrainer: {asked[:200]}")

    return reply
