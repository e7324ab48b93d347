"""`Retry-After` in each of its forms, and the waits without one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from offbook.llms import llm
from offbook.llms.provider import retry_after


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Mon, 01 Jan 2026 00:00:00 +9999999999"}, None),
        ({"retry-after": "Mon, 01 Jan 99999 00:00:00 GMT"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_retry_after_in_seconds(headers: dict[str, str] | None, seconds: float | None) -> None:
    assert retry_after(headers) == seconds


def test_retry_after_as_a_date() -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert retry_after({"retry-after": date}) == pytest.approx(90, abs=5)


def test_waits_are_random_below_a_bound_that_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "FIRST_WAIT", 1.0)
    monkeypatch.setattr(llm.random, "uniform", lambda low, high: high)
    assert [llm.wait_before(attempt, None) for attempt in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert llm.wait_before(1, 7.0) == 7.25
