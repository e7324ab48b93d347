"""Apps in service: a trained model takes the paid one's place in an app of LangGraph, as a server's takeover decides."""

from offbook.base.errors import MissingExtraError

try:
    from .langgraph_app import deployed
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("offbook"):
        raise
    raise MissingExtraError(error.name, "langgraph") from error

__all__ = ["deployed"]
