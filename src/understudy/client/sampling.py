"""Sampling settings that hold for the calls made here, over whatever the agent asks for (evaluations are greedy)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_temperature: ContextVar[float | None] = ContextVar("understudy_temperature", default=None)


def forced_temperature() -> float | None:
    """The temperature that calls to a trainable model must use here; None: what the agent asks for."""
    return _temperature.get()


@contextmanager
def at_temperature(temperature: float | None) -> Generator[None]:
    """Calls to trainable models made inside, in this context, use this temperature."""
    token = _temperature.set(temperature)
    try:
        yield
    finally:
        _temperature.reset(token)
