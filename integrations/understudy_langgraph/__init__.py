"""LangGraph and LangChain apps: every chat model call captured, redirected and trained, with no edit to the app."""

from understudy.errors import MissingExtraError

try:
    from .capture import uncaptured
    from .chat_model import ChatUnderstudy
    from .observe import observe
    from .scope import capture
    from .trainable import trainable
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("understudy"):
        raise
    raise MissingExtraError(error.name, "langgraph") from error

__all__ = ["ChatUnderstudy", "capture", "observe", "trainable", "uncaptured"]
