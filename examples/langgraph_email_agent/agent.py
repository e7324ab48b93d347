"""An agent that answers questions about an inbox: it searches, it reads, it answers."""

from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_openai import ChatOpenAI
from langgraph.graph.state import CompiledStateGraph
from langgraph_email_agent.inbox import Inbox

PROMPT = (
    "Answer questions about the inbox: search, read, then answer in one short sentence. "
    "Later messages correct earlier ones."
)


def make_agent(inbox: Inbox, max_tokens: int = 400) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The agent over one inbox; each of its turns has at most `max_tokens` tokens, and after eight it gives up."""

    def read_message(message: str) -> dict[str, str] | str:
        """Read a message: who wrote it, and what."""
        return inbox.read(message) or f"There is no message {message}."

    def search_inbox(words: str, sender: str = "", after: str = "", before: str = "") -> list[dict[str, str]] | str:
        """Find messages that have all of the words, the newest first. Dates are like 2026-05-31."""
        return inbox.search(words, sender, after, before) or "No message has all of these words."

    return create_agent(
        ChatOpenAI(model="gpt-4.1-mini", max_completion_tokens=max_tokens),
        [read_message, search_inbox],
        system_prompt=PROMPT,
        middleware=[ModelCallLimitMiddleware(run_limit=8)],
    )
