"""The page of metrics is the tables in the code."""

from __future__ import annotations

from tests.paths import ROOT, script


def test_the_page_of_metrics_is_made_from_the_code() -> None:
    made = script(ROOT / "scripts" / "metrics_page.py")
    assert made.PAGE.read_text("utf-8") == made.page(), "run: python scripts/metrics_page.py"
