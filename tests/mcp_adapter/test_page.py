"""The Python of docs/mcp.md runs, and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

import offbook_mcp
from tests.docs.test_pages import code_of, run
from tests.paths import ROOT


@pytest.mark.slow("whole trainings")
def test_the_page_runs_top_to_bottom(tmp_path: Path) -> None:
    printed = run("\n".join(code_of("mcp.md")), tmp_path).splitlines()
    assert printed[:3] == ["-3.5h False", "8 True", "['convert_time']"]
    assert '"time_difference": "-3.5h"' in printed[3]


def test_the_page_names_every_error() -> None:
    page = (ROOT / "docs/mcp.md").read_text()
    assert [name for name in offbook_mcp.__all__ if name.endswith("Error") and name not in page] == []
