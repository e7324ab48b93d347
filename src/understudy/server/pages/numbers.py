"""Numbers, times and durations as pages show them. `None` is shown as a dash."""

from __future__ import annotations

import math
import time

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits, or whole where it is; thousands are separated from 10,000 on.
    What is smaller than 1e-9 is noise of the arithmetic and shown as 0."""
    if value is None or not math.isfinite(value):
        return DASH
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}" if abs(value) >= 10_000 else _minus(str(int(value)))
    if abs(value) >= 1000:
        return _minus(f"{value:,.0f}")
    if abs(value) < 1e-9:
        return "0"
    if abs(value) < 10 ** -(digits + 1):
        return _minus(f"{value:.1e}")
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return _minus(f"{value:.{places}f}")


def fixed(value: float | None, places: int = 2) -> str:
    """A number with so many places."""
    return DASH if value is None or not math.isfinite(value) else _minus(f"{value:.{places}f}")


def signed(value: float | None, places: int = 2) -> str:
    """A number that always shows its sign; what rounds to zero has none."""
    if value is None or not math.isfinite(value):
        return DASH
    text = f"{abs(value):.{places}f}"
    if float(text) == 0:
        return text
    return ("+" if value > 0 else MINUS) + text


def percent(share: float | None, places: int = 0) -> str:
    return DASH if share is None or not math.isfinite(share) else _minus(f"{100 * share:.{places}f} %")


def seconds(value: float | None) -> str:
    """A duration: `340 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if value is None or not math.isfinite(value):
        return DASH
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def moment(value: float | None) -> str:
    """Unix seconds as UTC, to the second."""
    return DASH if value is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))


def machine_moment(value: float) -> str:
    """Unix seconds for the `datetime` attribute of `<time>`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(value))


def ago(value: float, now: float | None = None) -> str:
    """How long ago a moment was: `just now`, `5 min ago`, `3 days ago`."""
    passed = (time.time() if now is None else now) - value
    if passed < 60:
        return "just now"
    if passed < 3600:
        return f"{passed / 60:.0f} min ago"
    if passed < 86_400:
        return f"{passed / 3600:.0f} h ago"
    days = round(passed / 86_400)
    return f"{days} day{'s' if days > 1 else ''} ago"


def _minus(text: str) -> str:
    return text.replace("-", MINUS, 1) if text.startswith("-") else text
