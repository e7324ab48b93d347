"""Limits on the time and memory that a server may use."""

from __future__ import annotations

from dataclasses import dataclass

from offbook.base.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Limits per server and call. Raises ConfigError for a limit that is not above 0.

    start_seconds: until a server is ready. call_seconds: until a call has its response. explore_seconds: the same while the
    server is explored and scenarios are checked, which leave slower tools out. message_bytes: that a server may send before
    its response. result_chars: of a tool's result as the model reads it; the rest is cut.
    """

    start_seconds: float = 30.0
    call_seconds: float = 60.0
    explore_seconds: float = 5.0
    message_bytes: int = 8 * 2**20
    result_chars: int = 20_000

    def __post_init__(self) -> None:
        for name in ("start_seconds", "call_seconds", "explore_seconds", "message_bytes", "result_chars"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name}: a number above 0 is needed, got {value!r}")
