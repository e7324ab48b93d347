"""Formats numbers, times and durations for pages. None and values that are not finite become a dash."""

from __future__ import annotations

import math
import time

from offbook.base import clock

DASH = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits; whole numbers have no decimals, and large ones have separators.

    Values below 1e-9 are rounding errors and shown as 0.

    >>> number(0.123456), number(2.0), number(12345)
    ('0.123', '2', '12,345')
    """
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
    """A number with this many decimals."""
    return DASH if value is None or not math.isfinite(value) else _minus(f"{value:.{places}f}")


def signed(value: float | None, places: int = 2) -> str:
    """A number with its sign. A number that rounds to zero has none.

    >>> signed(0.25), signed(0.001)
    ('+0.25', '0.00')
    """
    if value is None or not math.isfinite(value):
        return DASH
    text = f"{abs(value):.{places}f}"
    if float(text) == 0:
        return text
    return ("+" if value > 0 else MINUS) + text


def percent(share: float | None, places: int = 0) -> str:
    """A share as a percentage.

    >>> percent(0.125, 1)
    '12.5 %'
    """
    return DASH if share is None or not math.isfinite(share) else _minus(f"{100 * share:.{places}f} %")


def seconds(value: float | None) -> str:
    """A duration.

    >>> seconds(0.34), seconds(4.2), seconds(200), seconds(7500)
    ('340 ms', '4.2 s', '3 min 20 s', '2 h 5 min')
    """
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
    """Unix seconds as date and time in UTC.

    >>> moment(0)
    '1970-01-01 00:00:00 UTC'
    """
    return DASH if value is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))


def machine_moment(value: float) -> str:
    """Unix seconds in the format of the `datetime` attribute of `<time>`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(value))


def ago(value: float, now: float | None = None) -> str:
    """The time since a moment in unix seconds. `now` defaults to the current time.

    >>> ago(0, now=30), ago(0, now=300), ago(0, now=259_200)
    ('just now', '5 min ago', '3 days ago')
    """
    passed = (clock.now() if now is None else now) - value
    if passed < -60:  # of another machine's clock
        return moment(value)
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
