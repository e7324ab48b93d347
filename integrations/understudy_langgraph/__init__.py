"""LangGraph and LangChain apps: every chat model call captured, redirected and trained, with no edit to the app."""

from .chat_model import ChatUnderstudy
from .scope import capture
from .trainable import trainable

__all__ = ["ChatUnderstudy", "capture", "trainable"]
