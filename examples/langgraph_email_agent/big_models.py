"""Two scripted "big models" for the tiny form, behind one OpenAI-compatible URL: a comparison that costs nothing. Run, it serves them."""

import argparse
import json
import re
import time
import zlib
from collections.abc import Callable

from offbook.testing import LlmReply, LlmRequest, calls_tool, says, scripted_llm

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
            words = quoted[1] if quoted else question
            return calls_tool("search_inbox", {"words": words}, usage=(sent, 20), seconds=seconds)
        if len(messages) <= 4:
            hits = json.loads(last["content"]) if last["content"].startswith("[") else []
            message = hits[0]["message"] if hits else "m-1"
            return calls_tool("read_message", {"message": message}, usage=(sent, 20), seconds=seconds)
        mail = json.loads(last["content"]) if last["content"].startswith("{") else {"from": "", "body": ""}
        right = zlib.crc32(question.encode()) % 100 < skill
        asked = "from" if {"from", "who"} & set(question.split()) else "body"
        text = mail[asked] if right else "I could not find that."
        return says(text, usage=(sent, len(text) // 4 + 1), seconds=seconds)

    return reply


def both(request: LlmRequest) -> LlmReply:
    """The model that the request names."""
    return reader(*SKILLS[request.body["model"]])(request)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    with scripted_llm(both) as endpoint:
        print(f"{', '.join(SKILLS)} at {endpoint.url}, until Ctrl-C", flush=True)
        while True:
            time.sleep(1)
