"""The page of metrics is the tables in the code."""

from __future__ import annotations

import importlib.util

from tests.paths import ROOT


def test_the_page_of_metrics_is_made_from_the_code() -> None:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "scripts" / "metrics_page.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert made.PAGE.read_text("utf-8") == made.page(), "run: python scripts/metrics_page.py"
