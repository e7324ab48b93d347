"""A judge for the tiny form, by script, that does not know the answers: it looks whether an answer stands in what was read."""

import json

from langgraph_email_agent.questions import LONGEST_ANSWER, states

from offbook.testing import LlmReply, LlmRequest, ShownConversation, judges


def score(conversations: list[ShownConversation]) -> float:
    """0.1 for a search, 0.2 more for reading the newest message that was found, 0.7 more if the last message is all of a
    field of that message."""
    messages = conversations[0].messages
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or []]
    results = [str(message["content"]) for message in messages if message["role"] == "tool"]
    found = next((json.loads(text) for text in results if text.startswith("[{")), [])
    newest = found[0]["message"] if found else None
    opened = [
        result
        for call, result in zip(calls, results, strict=False)
        if call["name"] == "read_message" and json.loads(call["arguments"] or "{}").get("message") == newest
    ]
    said = str(messages[-1].get("content") or "")
    fields = [*json.loads(opened[0]).values()] if opened and opened[0].startswith("{") else []
    grounded = messages[-1]["role"] == "assistant" and len(said) <= LONGEST_ANSWER
    grounded = grounded and any(states(said, field) for field in fields)
    return 0.1 * bool(found) + 0.2 * bool(opened) + 0.7 * grounded


def reply(request: LlmRequest) -> LlmReply:
    return judges(request, score)
