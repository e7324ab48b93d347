"""The Python of the page about trainings from a description runs as it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_pages import code_of, run


@pytest.mark.slow("seconds each: processes, trainings, deadlines")
def test_the_page_about_descriptions_runs_as_it_is_shown(tmp_path: Path) -> None:
    printed = run("\n".join(code_of("auto.md")), tmp_path)
    assert printed.splitlines()[-1] == ("nothing was measured yet: it was not asked for; the last whole stage is task")
