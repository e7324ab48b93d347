"""Detects texts that depend on the current date."""

from __future__ import annotations

import re
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
