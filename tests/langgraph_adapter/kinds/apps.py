"""What the apps of the catalogue are made of. Their own models cannot be reached: every answer comes from the policy."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

DEAD = "http://127.0.0.1:9/v1"
"""Nothing listens here: a call that is not captured fails at once."""


def own_model(**options: Any) -> ChatOpenAI:
    """The app's own model."""
    given: dict[str, Any] = {"model": "gpt-4.1-mini", "api_key": "unused", "base_url": DEAD, "max_retries": 0}
    return ChatOpenAI(**(given | options))


def asked(text: str) -> Any:
    """The input of any agent: LangChain types it by the graph's state."""
    return {"messages": [HumanMessage(text)]}


def last(state: Any) -> str:
    """The text of the last message of a graph's state."""
    return state["messages"][-1].text


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def double(x: int) -> int:
    """Twice a number."""
    return 2 * x


class City(BaseModel):
    """A city."""

    city: str
    size: int


TEAL = City(city="teal", size=7)
"""What the policy fills in for a City."""
