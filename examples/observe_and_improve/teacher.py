"""The model that the agent pays for, by script: it calls the right tool for nine of ten questions, and reports the result."""

import re
import zlib

from observe_and_improve.visitors import QUESTIONS

from offbook.testing import LlmReply, LlmRequest, calls_tool, says

TOOLS = {"painter": "painter_name", "room": "room_name", "year": "paint_year"}
RIGHT = 90  # of 100 questions


def teacher(request: LlmRequest) -> LlmReply:
    question, last = request.messages[0]["content"], request.messages[-1]
    if last["role"] == "tool":
        return says(str(last["content"]))
    asked = next(field for field, words in QUESTIONS.items() if any(_fits(each, question) for each in words))
    fields = [asked, *(field for field in TOOLS if field != asked)]
    wrong = zlib.crc32(question.encode()) % 100 >= RIGHT
    number = re.findall(r"\d+", question)[0]
    return calls_tool(TOOLS[fields[wrong]], {"painting": number})


def _fits(words: str, question: str) -> bool:
    before, after = words.split("{}")
    return question.startswith(before) and question.endswith(after)
