"""The model that the shop pays for, by script: 0.4 seconds an answer, USD 0.40 and 1.60 per million tokens, 92 of 100 right."""

import re
import zlib

from offbook.testing import LlmReply, LlmRequest, calls_tool, says

QUESTIONS = {
    "order_status": ("has order {} left yet?", "is order {} on its way?"),
    "order_carrier": ("who brings order {}?", "which van has order {}?"),
    "order_total": ("how much was order {}?", "what did we pay for order {}?"),
}
"""Tool that answers -> the questions of customers. None names a tool."""
RIGHT = 92  # of 100 questions
SECONDS = 0.4
PRICE = "prompt_price=0.4&completion_price=1.6"


def paid(request: LlmRequest) -> LlmReply:
    question, last = request.messages[0]["content"], request.messages[-1]
    told = {"model": "gpt-4.1-mini", "seconds": SECONDS}
    read = sum(len(str(message.get("content"))) for message in request.messages) // 4 + 150
    if last["role"] == "tool":
        return says(str(last["content"]), usage=(read, 8), **told)
    order = re.findall(r"order (\d+)", question)[-1]
    asked = next(tool for tool, words in QUESTIONS.items() if any(each.format(order) in question for each in words))
    tools = [asked, *(tool for tool in QUESTIONS if tool != asked)]
    wrong = zlib.crc32(question.encode()) % 100 >= RIGHT
    return calls_tool(tools[wrong], {"order": order}, usage=(read, 16), **told)
