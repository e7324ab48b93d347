"""Bounds on what a server may take of our time and memory."""

from __future__ import annotations

from dataclasses import dataclass

from understudy.integration import ConfigError


@dataclass(frozen=True)
class Limits:
    """start_seconds: until a server is ready. call_seconds: until a call is answered. message_bytes: what a server may
    send until it has answered. result_chars: of one tool's result, as the model reads it."""

    start_seconds: float = 30.0
    call_seconds: float = 60.0
    message_bytes: int = 8 * 2**20
    result_chars: int = 20_000

    def __post_init__(self) -> None:
        for name in ("start_seconds", "call_seconds", "message_bytes", "result_chars"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name}: a number above 0 is needed, got {value!r}")
