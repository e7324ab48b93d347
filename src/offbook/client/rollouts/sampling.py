"""Sampling settings of a context that override those of the agent; evaluations use them to sample greedily."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

MAX_COMPLETION_TOKENS = 1024
"""Default limit of a rollout's completions, in tokens."""

BUNDLED = {
    "tiny": "tiny answers with calls of tools that have one string argument",
    "tiny-mcp": "tiny-mcp answers with calls of tools that have up to three arguments",
}
"""What the bundled bases can write, for failures of calls that want something else."""

_temperature: ContextVar[float | None] = ContextVar("offbook_temperature", default=None)
_completion_limit: ContextVar[int | None] = ContextVar("offbook_completion_limit", default=None)


def forced_temperature() -> float | None:
    """The temperature for calls to trainable models in this context; None: the agent's own."""
    return _temperature.get()


def completion_limit() -> int | None:
    """The most tokens of a trainable model's completion in this context; None: the agent's own limit."""
    return _completion_limit.get()


@contextmanager
def at_temperature(temperature: float | None) -> Generator[None]:
    """Sample trainable models at this temperature inside the block, in this context. None leaves it to the agent."""
    token = _temperature.set(temperature)
    try:
        yield
    finally:
        _temperature.reset(token)


@contextmanager
def completions_limited(limit: int) -> Generator[None]:
    """Limit completions of trainable models inside the block, in this context, to `limit` tokens."""
    token = _completion_limit.set(limit)
    try:
        yield
    finally:
        _completion_limit.reset(token)
