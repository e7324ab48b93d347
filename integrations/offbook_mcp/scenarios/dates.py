"""Detects texts that depend on the current date."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

_DAYS = 2
_DATE = re.compile(r"(?<!\d)\d{4}-\d\d-\d\d(?!\d)")
_SPOKEN = re.compile(r"\b[A-Z][a-z]{2} \d{1,2} \d{4}\b")


def is_dated(text: str, now: datetime | None = None) -> bool:
    """Whether a text contains a date within two days of now, so that it will probably differ tomorrow."""
    today = (now or datetime.now(UTC)).date()
    near = [today + timedelta(days=days) for days in range(-_DAYS, _DAYS + 1)]
    dates = {f"{day:%Y-%m-%d}" for day in near} | {f"{day:%b %d %Y}" for day in near}
    dates |= {f"{day:%b} {day.day} {day.year}" for day in near}
    return any(match[0] in dates for pattern in (_DATE, _SPOKEN) for match in pattern.finditer(text))


_DATE_FORMATS = (
    *("%Y-%m-%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d-%m-%Y", "%Y%m%d", "%Y-%m"),
    *("%B %d, %Y", "%d %B %Y", "%b %d, %Y", "%d %b %Y"),
    *("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M"),
)
_SPELLED = re.compile(
    r"\b(?:YYYY|YY|MM|DD)(?:[-/. ]?(?:YYYY|YY|MM|DD)){1,2}(?:[T ]HH:MM(?::SS)?Z?)?(?![\w])", re.IGNORECASE
)
_PARTS = (("YYYY", "%Y"), ("YY", "%y"), ("HH:MM:SS", "%H:%M:%S"), ("HH:MM", "%H:%M"), ("MM", "%m"), ("DD", "%d"))


def dates_like(examples: Sequence[str], description: str) -> list[str]:
    """Dates in the format of the examples, or in one that the description spells, such as DD.MM.YYYY; [] without a format.

    They begin at an example, since a server may know only the dates around it.

    >>> dates_like(["31/12/2025"], "")[:2]
    ['31/12/2025', '01/01/2026']
    """
    spelled = _SPELLED.search(description)
    pattern = spelled[0].upper() if spelled else ""
    for part, code in _PARTS:
        pattern = pattern.replace(part, code)
    dated = [text for text in examples if any(_date(text, form) for form in _DATE_FORMATS)]
    fitting = [form for form in _DATE_FORMATS if dated and all(_date(text, form) for text in dated)]
    form = pattern or next(iter(fitting), "")
    if not form:
        return []
    first = next((date for text in dated if (date := _date(text, form))), None) or datetime(2026, 1, 3)
    step = 32 if "%d" not in form else 1
    return [(first + timedelta(days=step * days)).strftime(form) for days in range(28)]


def _date(text: str, form: str) -> datetime | None:
    """The date of a text in exactly this format, in a year of our time; None if it has another."""
    try:
        date = datetime.strptime(text, form)
    except ValueError:
        return None
    return date if date.strftime(form) == text and 1900 <= date.year <= 2100 else None
