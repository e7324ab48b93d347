"""The Python of the page about comparisons runs as it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import code_of, run


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_the_page_about_comparisons_runs_as_it_is_shown(tmp_path: Path) -> None:
    printed = run("\n".join(code_of("comparing.md")), tmp_path)
    assert printed.splitlines()[-1] == "Interval(mean=0.5, low=0.0, high=1.0, level=0.95)"
    assert (tmp_path / "comparison" / "report.md").exists()
