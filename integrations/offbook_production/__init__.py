"""Apps in service: the gateway before a paid model, feedback, takeovers by a trained model, the audit and removal of traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from offbook.base.errors import MissingExtraError

if TYPE_CHECKING:
    from .langgraph_app import deployed as deployed

__all__ = ["deployed"]


def __getattr__(name: str) -> Any:
    """`deployed`, which needs the extra `langgraph`, when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .langgraph_app import deployed
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("offbook"):
            raise
        raise MissingExtraError(error.name, "langgraph") from error
    return deployed
