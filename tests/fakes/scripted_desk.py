"""The model that the quickstart's app has, by script: an expert of the order desk, over OpenAI's API.

It is right in a share of the requests, which depends on the request alone; else it looks up something else."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

from offbook.quickstart.desk import REQUESTS, TOOLS
from offbook.testing import LlmReply, LlmRequest, calls_tool, says

_ORDER = re.compile(r"order (\d+)")


def desk_expert(right: float = 0.6) -> Callable[[LlmRequest], LlmReply]:
    """A script of an expert that is right in about this share of the requests."""

    def reply(request: LlmRequest) -> LlmReply:
        question = next(str(message["content"]) for message in request.messages if message["role"] == "user")
        results = [message for message in request.messages if message["role"] == "tool"]
        draw = random.Random(question)
        tool = _wanted(question)
        if draw.random() >= right:
            tool = draw.choice([name for name in TOOLS[:4] if name != tool])
        order = _ORDER.findall(question)[0]
        if not results:
            return calls_tool("order_customer" if tool == "customer_phone" else tool, {"order": order})
        value = next(iter(_value(results[-1]).values()))
        if tool == "customer_phone" and len(results) == 1:
            return calls_tool(tool, {"customer": value})
        return says(f"The answer is {value}.")

    return reply


def _wanted(question: str) -> str:
    for tool, wordings in REQUESTS.items():
        for wording in wordings:
            if re.search(re.escape(wording).replace(re.escape("{order}"), r"order \d+"), question):
                return tool
    raise AssertionError(f"{question!r} is no request to the desk")


def _value(message: dict[str, Any]) -> dict[str, Any]:
    return json.loads(message["content"])
