"""A user's app in production: a LangGraph agent on an OpenAI-compatible endpoint.

    python order_desk.py URL MODEL      prints the conversations as JSON

The tests also run it as a program, in a Python that has no Offbook.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTIONS = [
    "where is order 4821?",
    "cancel order 5913",
    "please look at order 7702 for me",
    "open a ticket about the invoice",
    "what happened to order 1180?",
    "i do not need order 2201 any more",
    "say hello",
    "the parcel 3307 is broken",
]


@tool
def find_order(order: str) -> str:
    """Where an order is."""
    return f"order {order} is on its way"


@tool
def cancel_order(order: str) -> str:
    """Cancel an order."""
    return f"order {order} is cancelled"


@tool
def open_ticket(subject: str) -> str:
    """Open a ticket."""
    return f"ticket about {subject} is open"


TOOLS = [find_order, cancel_order, open_ticket]


def make_agent(url: str, model: str, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "base_url": url,
        "model": model,
        "api_key": "none",
        "temperature": 0.0,
        "max_tokens": 64,
    }
    return create_agent(ChatOpenAI(**settings, max_retries=0, **options), TOOLS)


def conversation(agent: Any, question: str) -> list[dict[str, Any]]:
    """What was said and called until the agent ended, or its fourth turn."""
    state: dict[str, Any] = {}
    for state in agent.stream({"messages": [("user", question)]}, {"recursion_limit": 50}, stream_mode="values"):
        if len(state["messages"]) >= 8:
            break
    return [
        {
            "type": message.type,
            "text": message.text,
            "calls": [[call["name"], call["args"]] for call in getattr(message, "tool_calls", [])],
        }
        for message in state["messages"]
    ]


def main() -> None:
    if importlib.util.find_spec("offbook") is not None:
        raise SystemExit(f"offbook is installed in {sys.executable}: production shall do without it")
    url, model = sys.argv[1:]
    whole, streamed = make_agent(url, model), make_agent(url, model, streaming=True)
    said = {
        "whole": [conversation(whole, question) for question in QUESTIONS],
        "streamed": [conversation(streamed, question) for question in QUESTIONS],
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
