"""Captures, redirects and trains the chat model calls of LangGraph and LangChain apps, with no edit to the app."""

from offbook.base.errors import MissingExtraError

try:
    from offbook.client.rollouts.capture import outside as uncaptured

    from .calls.capture_block import capture, observe
    from .chat_model import ChatOffbook
    from .training.replayed_tools import replayed_tools
    from .training.trainable import trainable
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("offbook"):
        raise
    raise MissingExtraError(error.name, "langgraph") from error

__all__ = [
    "ChatOffbook",
    "capture",
    "observe",
    "replayed_tools",
    "trainable",
    "uncaptured",
]
