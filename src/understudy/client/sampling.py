"""Sampling settings that hold for the calls made here, over whatever the agent asks for (evaluations are greedy)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

MAX_COMPLETION_TOKENS = 1024
"""The longest completion of a rollout, where nothing else is set."""

_temperature: ContextVar[float | None] = ContextVar("understudy_temperature", default=None)
_completion_limit: ContextVar[int | None] = ContextVar("understudy_completion_limit", default=None)


def forced_temperature() -> float | None:
    """The temperature that calls to a trainable model must use here; None: what the agent asks for."""
    return _temperature.get()


def completion_limit() -> int | None:
    """The most tokens that a completion of a trainable model may have here; None: what the agent asks for."""
    return _completion_limit.get()


@contextmanager
def at_temperature(temperature: float | None) -> Generator[None]:
    """Calls to trainable models made inside, in this context, use this temperature."""
    token = _temperature.set(temperature)
    try:
        yield
    finally:
        _temperature.reset(token)


@contextmanager
def completions_limited(limit: int) -> Generator[None]:
    """Completions of trainable models made inside, in this context, have at most so many tokens."""
    token = _completion_limit.set(limit)
    try:
        yield
    finally:
        _completion_limit.reset(token)
