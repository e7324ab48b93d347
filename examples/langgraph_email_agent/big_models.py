"""Two scripted "big models" for the tiny form, behind one OpenAI-compatible URL: a comparison that costs nothing. Run, it serves them."""

import argparse
import json
import re
import time
import zlib
from collections.abc import Callable

from understudy.llms.testing import LlmReply, LlmRequest, says, scripted_llm

QUOTED = re.compile(r'"([^"]+)"')
SKILLS = {"big-large": (95, 0.6), "big-small": (60, 0.2)}
"""Name -> questions of 100 that it gets right, and seconds of a call."""


def reader(skill: int, seconds: float = 0.0) -> Callable[[LlmRequest], LlmReply]:
    """A model that searches for what the question quotes, reads the newest hit, and answers with its body; in all but `skill` of
    100 questions it gives up at the end."""

    def reply(request: LlmRequest) -> LlmReply:
        messages = request.messages
        question = next(message["content"] for message in messages if message["role"] == "user")
        last, sent = messages[-1], sum(len(json.dumps(message)) for message in messages) // 4
        if last["role"] == "user":
            quoted = QUOTED.search(question)
            return calls("search_inbox", {"words": quoted[1] if quoted else question}, sent, seconds)
        if len(messages) <= 4:
            hits = json.loads(last["content"]) if last["content"].startswith("[") else []
            return calls("read_message", {"message": hits[0]["message"] if hits else "m-1"}, sent, seconds)
        mail = json.loads(last["content"]) if last["content"].startswith("{") else {"from": "", "body": ""}
        right = zlib.crc32(question.encode()) % 100 < skill
        asked = "from" if {"from", "who"} & set(question.split()) else "body"
        text = mail[asked] if right else "I could not find that."
        return says(text, usage=(sent, len(text) // 4 + 1), seconds=seconds)

    return reply


def calls(tool: str, arguments: dict[str, str], sent: int, seconds: float) -> LlmReply:
    """A tool call."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    call = {"id": f"call-{tool}", "type": "function", "function": function}
    return says(None, finish_reason="tool_calls", usage=(sent, 20), seconds=seconds, tool_calls=[call])


def both(request: LlmRequest) -> LlmReply:
    """The model that the request names."""
    return reader(*SKILLS[request.body["model"]])(request)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    with scripted_llm(both) as endpoint:
        print(f"{', '.join(SKILLS)} at {endpoint.url}, until Ctrl-C", flush=True)
        while True:
            time.sleep(1)
